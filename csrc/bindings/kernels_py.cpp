// hdpcomm._core.kernels: raw pointers, sizes and types; the Python callers (hdpcomm.attention) hold
// the tensors and have checked shapes and devices.
#include "bindings/kernels_py.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "kernels/merge.hpp"
#include "kernels/rows.hpp"
#include "kernels/zigzag.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using kernels::MergeArgs;
using kernels::RowsArgs;
using kernels::RowSegment;

void merge(uint64_t out, uint64_t lse, uint64_t block_out, uint64_t block_lse, uint64_t rows,
           const std::array<int64_t, 3>& shape, const std::array<int64_t, 2>& block_lse_strides,
           int acc, int block, int num_threads, bool cuda, uint64_t stream) {
  MergeArgs args;
  args.out = pointer(out);
  args.lse = pointer(lse);
  args.block_out = pointer(block_out);
  args.block_lse = pointer(block_lse);
  args.rows = static_cast<const int64_t*>(pointer(rows));
  args.tokens = shape[0];
  args.heads = shape[1];
  args.dim = shape[2];
  args.block_lse_token_stride = block_lse_strides[0];
  args.block_lse_head_stride = block_lse_strides[1];
  args.acc = static_cast<DType>(acc);
  args.block = static_cast<DType>(block);
  HDP_RUN_KERNEL(merge, args, num_threads);
}

using Strides = std::array<int64_t, 2>;  // of dst and of src, in bytes

RowsArgs rowsArgs(uint64_t dst, uint64_t src, const Strides& strides, int64_t row_bytes,
                  uint64_t segments, int64_t num_segments, int64_t total_rows) {
  RowsArgs args;
  args.dst = pointer(dst);
  args.src = pointer(src);
  args.dst_stride = strides[0];
  args.src_stride = strides[1];
  args.row_bytes = row_bytes;
  args.segments = static_cast<const RowSegment*>(pointer(segments));
  args.num_segments = num_segments;
  args.total_rows = total_rows;
  return args;
}

void copyRows(uint64_t dst, uint64_t src, const Strides& strides, int64_t row_bytes,
              uint64_t segments, int64_t num_segments, int64_t total_rows, uint64_t positions,
              bool cuda, uint64_t stream) {
  RowsArgs args = rowsArgs(dst, src, strides, row_bytes, segments, num_segments, total_rows);
  args.positions = static_cast<int64_t*>(pointer(positions));
  HDP_RUN_KERNEL(copyRows, args);
}

void addRows(uint64_t dst, uint64_t src, const Strides& strides, int64_t row_bytes,
             uint64_t segments, int64_t num_segments, int64_t total_rows, int dtype, bool cuda,
             uint64_t stream) {
  RowsArgs args = rowsArgs(dst, src, strides, row_bytes, segments, num_segments, total_rows);
  args.dtype = static_cast<DType>(dtype);
  HDP_RUN_KERNEL(addRows, args);
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

void throwNoCuda() {
  throw Error(ErrorKind::kDevice,
              "this build of hdpcomm has no CUDA kernels (no driver, toolkit or CUDA compiler was "
              "found when it was built); set CMAKE_ARGS=-DHDPCOMM_CUDA=ON and install it again");
}

void bindKernels(py::module_& module) {
  module.doc() = "Maths on buffers, by raw pointer.";
  module.def("merge", &merge, py::arg("out"), py::arg("lse"), py::arg("block_out"),
             py::arg("block_lse"), py::arg("rows"), py::arg("shape"), py::arg("block_lse_strides"),
             py::arg("acc"), py::arg("block"), py::arg("num_threads"), py::arg("cuda"),
             py::arg("stream"));
  module.def("copy_rows", &copyRows, py::arg("dst"), py::arg("src"), py::arg("strides"),
             py::arg("row_bytes"), py::arg("segments"), py::arg("num_segments"),
             py::arg("total_rows"), py::arg("positions"), py::arg("cuda"), py::arg("stream"));
  module.def("add_rows", &addRows, py::arg("dst"), py::arg("src"), py::arg("strides"),
             py::arg("row_bytes"), py::arg("segments"), py::arg("num_segments"),
             py::arg("total_rows"), py::arg("dtype"), py::arg("cuda"), py::arg("stream"));
  bindKernelsBuffers(module);
  bindKernelsCrossEntropy(module);
  module.def("zigzag_bounds", &zigzagBounds, py::arg("cu_seqlens"), py::arg("size"),
             py::arg("key_limit") = 0.0, py::arg("limited") = 0.0);
}

}  // namespace hdpcomm
