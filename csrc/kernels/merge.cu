#include "cuda_launch.cuh"
#include "hdpcomm/kernels/merge.hpp"
#include "hdpcomm/kernels/merge_elem.hpp"
#include "hdpcomm/kernels/numeric_elem.hpp"

namespace hdpcomm::kernels {
namespace {

template <typename Value, int kCount>
struct alignas(sizeof(Value) * kCount) Vector {
  Value values[kCount];
};

// One warp a row (token, head): lane 0 writes the LSE after all lanes have read it; lanes take
// kWidth elements at a time, and the last dim % kWidth elements are handled one by one.
template <typename Acc, typename Block, int kWidth>
__global__ void mergeKernel(MergeArgs args) {
  constexpr int kWarp = 32;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const int64_t total = args.tokens * args.heads;
  auto* lse = static_cast<Acc*>(args.lse);
  for (int64_t item = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
       item < total; item += warps) {
    const int64_t token = item / args.heads;
    const int64_t head = item % args.heads;
    const int64_t row = (args.rows == nullptr ? token : args.rows[token]) * args.heads + head;
    const auto merged = mergeRow(
        lse[row], static_cast<const Acc*>(args.block_lse)[token * args.block_lse_token_stride +
                                                          head * args.block_lse_head_stride]);
    __syncwarp();
    if (lane == 0) lse[row] = merged.lse;
    if (merged.take == Acc(0)) continue;
    Acc* out = static_cast<Acc*>(args.out) + row * args.dim;
    const Block* block = static_cast<const Block*>(args.block_out) + item * args.dim;
    const int64_t vectors = args.dim / kWidth;
    for (int64_t i = lane; i < vectors; i += kWarp) {
      auto sum = reinterpret_cast<Vector<Acc, kWidth>*>(out)[i];
      const auto part = reinterpret_cast<const Vector<Block, kWidth>*>(block)[i];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum.values[j] =
            mergeElement(sum.values[j], static_cast<Acc>(widen(part.values[j])), merged.take);
      }
      reinterpret_cast<Vector<Acc, kWidth>*>(out)[i] = sum;
    }
    for (int64_t i = vectors * kWidth + lane; i < args.dim; i += kWarp) {
      out[i] = mergeElement(out[i], static_cast<Acc>(widen(block[i])), merged.take);
    }
  }
}

template <typename Acc, typename Block>
void launch(const MergeArgs& args, cudaStream_t stream) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(Acc));  // 16-byte accesses to the sums
  const unsigned blocks = blocksFor(args.tokens * args.heads * 32);
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const auto row_out = static_cast<uint64_t>(args.dim) * sizeof(Acc);
  const auto row_block = static_cast<uint64_t>(args.dim) * sizeof(Block);
  const bool wide =
      commonWidth(address(args.out), row_out) == 16 &&
      commonWidth(address(args.block_out), row_block) >= kWidth * int64_t{sizeof(Block)};
  if (wide) {
    mergeKernel<Acc, Block, kWidth><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    mergeKernel<Acc, Block, 1><<<blocks, kThreads, 0, stream>>>(args);
  }
  checkLaunch("merge");
}

}  // namespace

void mergeCuda(const MergeArgs& args, void* stream) {
  checkMerge(args);
  if (args.tokens == 0 || args.heads == 0) return;
  auto* queue = static_cast<cudaStream_t>(stream);
  if (args.acc == DType::kFloat64) return launch<double, double>(args, queue);
  switch (args.block) {
    case DType::kBFloat16:
      return launch<float, BFloat16>(args, queue);
    case DType::kFloat16:
      return launch<float, Float16>(args, queue);
    default:
      return launch<float, float>(args, queue);
  }
}

}  // namespace hdpcomm::kernels
