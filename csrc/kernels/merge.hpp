// Launchers of the LSE merge.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"

namespace hdpcomm::kernels {

// out [*, heads, dim] and lse [*, heads] are the running result, contiguous, both of type `acc`
// (float32 or float64). block_out [tokens, heads, dim] is contiguous; block_lse is of type `acc`
// and has any strides (in elements). Token i of the block belongs to row `rows[i]` of the running
// result, or to row i where `rows` is null; no row may occur twice.
struct MergeArgs {
  void* out = nullptr;
  void* lse = nullptr;
  const void* block_out = nullptr;
  const void* block_lse = nullptr;
  const int64_t* rows = nullptr;
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t dim = 0;
  int64_t block_lse_token_stride = 0;
  int64_t block_lse_head_stride = 0;
  DType acc = DType::kFloat32;
  DType block = DType::kFloat32;  // type of block_out: the type of acc, or bfloat16 or float16
};

// Rows are independent, so the result does not depend on num_threads. Throws InvalidUsage.
void mergeCpu(const MergeArgs& args, int num_threads);

// Enqueues on `stream` (a cudaStream_t); `rows` lies in device memory. Throws InvalidUsage or, when
// the launch fails, DeviceError.
void mergeCuda(const MergeArgs& args, void* stream);

// Shared by both launchers.
void checkMerge(const MergeArgs& args);

}  // namespace hdpcomm::kernels
