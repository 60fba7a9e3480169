// Softmax cross-entropy.
#include <pybind11/stl.h>

#include <array>

#include "bindings/kernels_py.hpp"
#include "kernels/cross_entropy.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Shape = std::array<int64_t, 6>;  // in the order of the fields of CrossEntropyShape

kernels::CrossEntropyShape shapeOf(const Shape& shape, int dtype) {
  return {
      .tokens = shape[0],
      .columns = shape[1],
      .stride = shape[2],
      .first_column = shape[3],
      .total_columns = shape[4],
      .ignore_index = shape[5],
      .dtype = static_cast<DType>(dtype),
  };
}

const int64_t* labelsAt(uint64_t address) { return static_cast<const int64_t*>(pointer(address)); }
float* floatsAt(uint64_t address) { return static_cast<float*>(pointer(address)); }

void stats(const Shape& shape, int dtype, uint64_t logits, uint64_t labels, uint64_t stats,
           int num_threads, bool cuda, uint64_t stream) {
  const kernels::CrossEntropyStatsArgs args{
      .shape = shapeOf(shape, dtype),
      .logits = pointer(logits),
      .labels = labelsAt(labels),
      .stats = floatsAt(stats),
  };
  HDP_RUN_KERNEL(crossEntropyStats, args, num_threads);
}

void loss(uint64_t stats, uint64_t labels, uint64_t weights, uint64_t sums, uint64_t loss,
          int64_t shards, int64_t tokens, int64_t ignore_index, bool cuda, uint64_t stream) {
  const kernels::CrossEntropyLossArgs args{
      .stats = floatsAt(stats),
      .labels = labelsAt(labels),
      .weights = floatsAt(weights),
      .sums = floatsAt(sums),
      .loss = floatsAt(loss),
      .shards = shards,
      .tokens = tokens,
      .ignore_index = ignore_index,
  };
  HDP_RUN_KERNEL(crossEntropyLoss, args);
}

void grad(const Shape& shape, int dtype, uint64_t logits, uint64_t labels, uint64_t sums,
          uint64_t weights, uint64_t upstream, int64_t upstream_stride, uint64_t grad,
          int num_threads, bool cuda, uint64_t stream) {
  const kernels::CrossEntropyGradArgs args{
      .shape = shapeOf(shape, dtype),
      .logits = pointer(logits),
      .labels = labelsAt(labels),
      .sums = floatsAt(sums),
      .weights = floatsAt(weights),
      .upstream = floatsAt(upstream),
      .upstream_stride = upstream_stride,
      .grad = pointer(grad),
  };
  HDP_RUN_KERNEL(crossEntropyGrad, args, num_threads);
}

}  // namespace

void bindKernelsCrossEntropy(py::module_& module) {
  module.def("cross_entropy_stats", &stats, py::arg("shape"), py::arg("dtype"), py::arg("logits"),
             py::arg("labels"), py::arg("stats"), py::arg("num_threads"), py::arg("cuda"),
             py::arg("stream"));
  module.def("cross_entropy_loss", &loss, py::arg("stats"), py::arg("labels"), py::arg("weights"),
             py::arg("sums"), py::arg("loss"), py::arg("shards"), py::arg("tokens"),
             py::arg("ignore_index"), py::arg("cuda"), py::arg("stream"));
  module.def("cross_entropy_grad", &grad, py::arg("shape"), py::arg("dtype"), py::arg("logits"),
             py::arg("labels"), py::arg("sums"), py::arg("weights"), py::arg("upstream"),
             py::arg("upstream_stride"), py::arg("grad"), py::arg("num_threads"), py::arg("cuda"),
             py::arg("stream"));
}

}  // namespace hdpcomm
