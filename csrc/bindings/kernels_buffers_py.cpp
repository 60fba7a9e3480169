// Kernels on flat buffers: reductions, and those that read the buffers of several ranks.
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "bindings/kernels_py.hpp"
#include "kernels/peers.hpp"
#include "kernels/reduce.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Addresses = std::vector<uint64_t>;

void reduce(uint64_t out, uint64_t a, uint64_t b, int64_t count, int dtype, int op, bool cuda,
            uint64_t stream) {
  const kernels::ReduceArgs args{
      .out = pointer(out),
      .a = pointer(a),
      .b = pointer(b),
      .count = count,
      .dtype = static_cast<DType>(dtype),
      .op = static_cast<RedOp>(op),
  };
  HDP_RUN_KERNEL(reduce, args);
}

void divide(uint64_t data, int64_t count, double divisor, int dtype, bool cuda, uint64_t stream) {
  const kernels::DivideArgs args{
      .data = pointer(data),
      .count = count,
      .divisor = divisor,
      .dtype = static_cast<DType>(dtype),
  };
  HDP_RUN_KERNEL(divide, args);
}

// Fills the table of pointers and returns the number of addresses, which may be more than fit: the
// check of the arguments refuses that.
template <typename Pointer>
int fill(Pointer (&table)[kernels::kMaxPeers], const Addresses& addresses) {
  const size_t count = std::min<size_t>(addresses.size(), kernels::kMaxPeers);
  for (size_t i = 0; i < count; ++i) table[i] = pointer(addresses[i]);
  return static_cast<int>(addresses.size());
}

void fold(const Addresses& outputs, const Addresses& inputs, int64_t count, int dtype, int op,
          bool cuda, uint64_t stream) {
  kernels::FoldArgs args;
  args.num_outputs = fill(args.outputs, outputs);
  args.num_inputs = fill(args.inputs, inputs);
  args.count = count;
  args.dtype = static_cast<DType>(dtype);
  args.op = static_cast<RedOp>(op);
  HDP_RUN_KERNEL(fold, args);
}

void collect(uint64_t out, const Addresses& inputs, int64_t bytes, int64_t stride, int first,
             bool cuda, uint64_t stream) {
  kernels::CollectArgs args;
  args.num_inputs = fill(args.inputs, inputs);
  args.first = first;
  args.out = pointer(out);
  args.bytes = bytes;
  args.stride = stride;
  HDP_RUN_KERNEL(collect, args);
}

void put(uint64_t dst, uint64_t src, int64_t bytes, uint64_t flag, uint32_t value, bool cuda,
         uint64_t stream) {
  const kernels::PutArgs args{
      .dst = pointer(dst),
      .src = pointer(src),
      .bytes = bytes,
      .flag = static_cast<uint32_t*>(pointer(flag)),
      .value = value,
  };
  HDP_RUN_KERNEL(put, args);
}

}  // namespace

void bindKernelsBuffers(py::module_& module) {
  py::dict ops;
  for (const RedOp op : {RedOp::kSum, RedOp::kProd, RedOp::kMin, RedOp::kMax, RedOp::kAvg}) {
    ops[redOpName(op)] = static_cast<int>(op);
  }
  module.attr("OPS") = ops;
  module.def("reduce", &reduce, py::arg("out"), py::arg("a"), py::arg("b"), py::arg("count"),
             py::arg("dtype"), py::arg("op"), py::arg("cuda"), py::arg("stream"));
  module.def("divide", &divide, py::arg("data"), py::arg("count"), py::arg("divisor"),
             py::arg("dtype"), py::arg("cuda"), py::arg("stream"));
  module.def("fold", &fold, py::arg("outputs"), py::arg("inputs"), py::arg("count"),
             py::arg("dtype"), py::arg("op"), py::arg("cuda"), py::arg("stream"));
  module.def("collect", &collect, py::arg("out"), py::arg("inputs"), py::arg("bytes"),
             py::arg("stride"), py::arg("first"), py::arg("cuda"), py::arg("stream"));
  module.def("put", &put, py::arg("dst"), py::arg("src"), py::arg("bytes"), py::arg("flag"),
             py::arg("value"), py::arg("cuda"), py::arg("stream"));
}

}  // namespace hdpcomm
