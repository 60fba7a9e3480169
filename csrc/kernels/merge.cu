#include "kernels/merge.hpp"
#include "kernels/merge_elem.hpp"
#include "kernels/numeric_elem.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

template <typename Acc, typename Block, int kWidth>
__device__ __forceinline__ Pack<Acc, kWidth> mergeVector(Pack<Acc, kWidth> sum,
                                                         const Pack<Block, kWidth>& part,
                                                         Acc take) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sum.values[j] = mergeElement(sum.values[j], static_cast<Acc>(widen(part.values[j])), take);
  }
  return sum;
}

// Where the row of a (token, head) lies.
struct Place {
  int64_t row;        // of the running result, in rows of `dim`
  int64_t block_lse;  // in elements
};

__device__ __forceinline__ Place placeOf(const MergeArgs& args, int64_t item, bool small) {
  int64_t token;
  if (small) {  // a 64-bit division takes some 100 instructions
    token = static_cast<uint32_t>(item) / static_cast<uint32_t>(args.heads);
  } else {
    token = item / args.heads;
  }
  const int64_t head = item - token * args.heads;
  const int64_t row = (args.rows == nullptr ? token : args.rows[token]) * args.heads + head;
  return {row, token * args.block_lse_token_stride + head * args.block_lse_head_stride};
}

// One warp per row (token, head): lane 0 writes the LSE after all lanes have read it. Lanes handle
// kWidth elements at a time, and the last dim % kWidth elements one by one. The first vectors are
// loaded at the same time as the LSEs.
template <typename Acc, typename Block, int kWidth>
__global__ void __launch_bounds__(kThreads) mergeKernel(const __grid_constant__ MergeArgs args) {
  constexpr int kWarp = 32;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t total = args.tokens * args.heads;
  const bool small = total <= INT32_MAX;
  const int64_t vectors = args.dim / kWidth;
  auto* lse = static_cast<Acc*>(args.lse);
  for (int64_t item = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
       item < total; item += warps) {
    const Place place = placeOf(args, item, small);
    Acc* out = static_cast<Acc*>(args.out) + place.row * args.dim;
    const Block* block = static_cast<const Block*>(args.block_out) + item * args.dim;
    Pack<Acc, kWidth> sum{};
    Pack<Block, kWidth> part{};
    if (lane < vectors) {
      sum = Pack<Acc, kWidth>::load(out + lane * kWidth);
      part = Pack<Block, kWidth>::load(block + lane * kWidth);
    }
    const auto merged =
        mergeRow(lse[place.row], static_cast<const Acc*>(args.block_lse)[place.block_lse]);
    __syncwarp();
    if (lane == 0) lse[place.row] = merged.lse;
    if (merged.take == Acc(0)) continue;
    if (lane < vectors) mergeVector(sum, part, merged.take).store(out + lane * kWidth);
#pragma unroll 1  // rows longer than 32 vectors are rare; unrolled, this loop costs registers
    for (int64_t i = lane + kWarp; i < vectors; i += kWarp) {
      mergeVector(Pack<Acc, kWidth>::load(out + i * kWidth),
                  Pack<Block, kWidth>::load(block + i * kWidth), merged.take)
          .store(out + i * kWidth);
    }
#pragma unroll 1
    for (int64_t i = vectors * kWidth + lane; i < args.dim; i += kWarp) {
      out[i] = mergeElement(out[i], static_cast<Acc>(widen(block[i])), merged.take);
    }
  }
}

template <typename Acc, typename Block>
void launch(const MergeArgs& args, void* stream) {
  constexpr int kWidth = 16 / static_cast<int>(sizeof(Acc));  // 16-byte accesses to the sums
  const unsigned blocks = blocksFor(args.tokens * args.heads * 32);
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const auto row_out = static_cast<uint64_t>(args.dim) * sizeof(Acc);
  const auto row_block = static_cast<uint64_t>(args.dim) * sizeof(Block);
  const bool wide =
      commonWidth(address(args.out), row_out) == 16 &&
      commonWidth(address(args.block_out), row_block) >= kWidth * int64_t{sizeof(Block)};
  if (wide) {
    launchKernel<mergeKernel<Acc, Block, kWidth>>("merge", blocks, kThreads, stream, args);
  } else {
    launchKernel<mergeKernel<Acc, Block, 1>>("merge", blocks, kThreads, stream, args);
  }
}

}  // namespace

void mergeCuda(const MergeArgs& args, void* stream) {
  checkMerge(args);
  if (args.tokens == 0 || args.heads == 0) return;
  if (args.acc == DType::kFloat64) return launch<double, double>(args, stream);
  withFloat(args.block, [&](auto value) { launch<float, decltype(value)>(args, stream); });
}

}  // namespace hdpcomm::kernels
