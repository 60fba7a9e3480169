// hdpcomm._core.kernels: raw pointers, sizes and types, by position; the Python callers
// (hdpcomm.kernels, hdpcomm.attention) hold the tensors and have checked shapes and devices.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "kernels/cross_entropy.hpp"
#include "kernels/merge.hpp"
#include "kernels/peers.hpp"
#include "kernels/reduce.hpp"
#include "kernels/rows.hpp"
#include "kernels/zigzag.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Addresses = std::vector<uint64_t>;

// As what a field of a kernel's arguments comes from Python: pointers as addresses, types by their
// codes, tables of the buffers of several ranks as lists of addresses.
template <typename Field>
using Given =
    std::conditional_t<std::is_array_v<Field>, Addresses,
                       std::conditional_t<std::is_pointer_v<Field>, uint64_t,
                                          std::conditional_t<std::is_enum_v<Field>, int, Field>>>;

template <typename Field>
void set(Field& field, const Given<Field>& given) {
  if constexpr (std::is_array_v<Field>) {
    const size_t count = std::min<size_t>(given.size(), std::extent_v<Field>);
    for (size_t i = 0; i < count; ++i) set(field[i], given[i]);
  } else if constexpr (std::is_pointer_v<Field>) {
    field = reinterpret_cast<Field>(given);
  } else {
    field = static_cast<Field>(given);
  }
}

// The numbers of buffers in the tables. They may be more than fit: the checks of the arguments
// refuse that.
void count(auto& args, const Addresses& outputs, const Addresses& inputs) {
  args.num_outputs = static_cast<int>(outputs.size());
  args.num_inputs = static_cast<int>(inputs.size());
}
void count(auto& args, uint64_t, const Addresses& inputs) {
  args.num_inputs = static_cast<int>(inputs.size());
}
void count(const auto&, const auto&, const auto&) {}

// Binds a kernel. In Python it takes the fields in this order, what else the CPU's launcher takes,
// and the device: whether it is CUDA, and the stream.
template <typename Args, typename... More, typename... Fields>
void bind(py::module_& module, const char* name, void (*cpu)(const Args&, More...),
          std::type_identity_t<void (*)(const Args&, void*)> on_cuda, Fields... fields) {
  module.def(
      name, [=](const Given<std::remove_reference_t<std::invoke_result_t<Fields, Args&>>>&... given,
                More... more, bool cuda, uint64_t stream) {
        Args args;
        (set(fields(args), given), ...);
        [&args](const auto& first, const auto& second, const auto&...) {
          count(args, first, second);
        }(given...);
        const GilRelease release;
        if (!cuda) return cpu(args, more...);
        if (on_cuda != nullptr) return on_cuda(args, reinterpret_cast<void*>(stream));
        throw Error(
            ErrorKind::kDevice,
            "this build of hdpcomm has no CUDA kernels (no driver, toolkit or CUDA compiler "
            "was found when it was built); set CMAKE_ARGS=-DHDPCOMM_CUDA=ON and install it "
            "again");
      });
}

#ifdef HDPCOMM_WITH_CUDA
#define HDP_KERNEL(name) kernels::name##Cpu, kernels::name##Cuda
#else
#define HDP_KERNEL(name) kernels::name##Cpu, nullptr
#endif
#define HDP_FIELD(member) [](auto& args) -> auto& { return args.member; }

void bindBuffers(py::module_& module) {
  bind(module, "reduce", HDP_KERNEL(reduce), HDP_FIELD(out), HDP_FIELD(a), HDP_FIELD(b),
       HDP_FIELD(count), HDP_FIELD(dtype), HDP_FIELD(op));
  bind(module, "divide", HDP_KERNEL(divide), HDP_FIELD(data), HDP_FIELD(count), HDP_FIELD(divisor),
       HDP_FIELD(dtype));
  bind(module, "fold", HDP_KERNEL(fold), HDP_FIELD(outputs), HDP_FIELD(inputs), HDP_FIELD(count),
       HDP_FIELD(dtype), HDP_FIELD(op));
  bind(module, "collect", HDP_KERNEL(collect), HDP_FIELD(out), HDP_FIELD(inputs), HDP_FIELD(bytes),
       HDP_FIELD(stride), HDP_FIELD(first));
  bind(module, "put", HDP_KERNEL(put), HDP_FIELD(dst), HDP_FIELD(src), HDP_FIELD(bytes),
       HDP_FIELD(flag), HDP_FIELD(value));
}

void bindRows(py::module_& module) {
  bind(module, "merge", HDP_KERNEL(merge), HDP_FIELD(out), HDP_FIELD(lse), HDP_FIELD(block_out),
       HDP_FIELD(block_lse), HDP_FIELD(rows), HDP_FIELD(tokens), HDP_FIELD(heads), HDP_FIELD(dim),
       HDP_FIELD(block_lse_token_stride), HDP_FIELD(block_lse_head_stride), HDP_FIELD(acc),
       HDP_FIELD(block));
  bind(module, "copy_rows", HDP_KERNEL(copyRows), HDP_FIELD(dst), HDP_FIELD(src),
       HDP_FIELD(dst_stride), HDP_FIELD(src_stride), HDP_FIELD(row_bytes), HDP_FIELD(segments),
       HDP_FIELD(num_segments), HDP_FIELD(total_rows), HDP_FIELD(positions));
  bind(module, "add_rows", HDP_KERNEL(addRows), HDP_FIELD(dst), HDP_FIELD(src),
       HDP_FIELD(dst_stride), HDP_FIELD(src_stride), HDP_FIELD(row_bytes), HDP_FIELD(segments),
       HDP_FIELD(num_segments), HDP_FIELD(total_rows), HDP_FIELD(dtype));
}

void bindCrossEntropy(py::module_& module) {
  bind(module, "cross_entropy_stats", HDP_KERNEL(crossEntropyStats), HDP_FIELD(shape.tokens),
       HDP_FIELD(shape.columns), HDP_FIELD(shape.stride), HDP_FIELD(shape.first_column),
       HDP_FIELD(shape.total_columns), HDP_FIELD(shape.ignore_index), HDP_FIELD(shape.dtype),
       HDP_FIELD(logits), HDP_FIELD(labels), HDP_FIELD(stats));
  bind(module, "cross_entropy_loss", HDP_KERNEL(crossEntropyLoss), HDP_FIELD(stats),
       HDP_FIELD(labels), HDP_FIELD(weights), HDP_FIELD(sums), HDP_FIELD(loss), HDP_FIELD(shards),
       HDP_FIELD(tokens), HDP_FIELD(ignore_index));
  bind(module, "cross_entropy_grad", HDP_KERNEL(crossEntropyGrad), HDP_FIELD(shape.tokens),
       HDP_FIELD(shape.columns), HDP_FIELD(shape.stride), HDP_FIELD(shape.first_column),
       HDP_FIELD(shape.total_columns), HDP_FIELD(shape.ignore_index), HDP_FIELD(shape.dtype),
       HDP_FIELD(logits), HDP_FIELD(labels), HDP_FIELD(sums), HDP_FIELD(weights),
       HDP_FIELD(upstream), HDP_FIELD(upstream_stride), HDP_FIELD(grad));
}

using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

py::array_t<int64_t> zigzagBounds(const Int64Array& cu_seqlens, int64_t ranks, double key_limit,
                                  double limited) {
  if (cu_seqlens.ndim() != 1 || cu_seqlens.size() == 0) {
    throwInvalidUsage("cu_seqlens must have one dimension and at least one entry (a 0); got " +
                      std::to_string(cu_seqlens.ndim()) + " dimensions and " +
                      std::to_string(cu_seqlens.size()) + " entries");
  }
  const int64_t sequences = cu_seqlens.size() - 1;
  const int64_t* cu = cu_seqlens.data();
  const std::vector<int64_t> bounds =
      limited == 0 ? kernels::zigzagBounds(cu, sequences, ranks)
                   : kernels::evenBounds(cu, sequences, ranks, key_limit, limited);
  py::array_t<int64_t> result({sequences, 2 * ranks + 1});
  std::copy(bounds.begin(), bounds.end(), result.mutable_data());
  return result;
}

}  // namespace

void bindKernels(py::module_& module) {
  module.doc() = "Maths on buffers, by raw pointer.";
  bindBuffers(module);
  bindRows(module);
  bindCrossEntropy(module);
  module.def("zigzag_bounds", &zigzagBounds, py::arg("cu_seqlens"), py::arg("size"),
             py::arg("key_limit") = 0.0, py::arg("limited") = 0.0);
}

}  // namespace hdpcomm
