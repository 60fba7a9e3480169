#include "kernels/merge.hpp"

#include <string>

#include "base/error.hpp"
#include "kernels/merge_elem.hpp"
#include "kernels/numeric_elem.hpp"
#include "kernels/parallel.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector_clones.hpp"

namespace hdpcomm::kernels {
namespace {

template <typename Acc, typename Block>
struct Blend {
  HDP_VECTOR_CLONES static void run(Acc* out, const Block* block, Acc take, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i) out[i] = mergeElement(out[i], Acc{widen(block[i])}, take);
  }
};

template <typename Acc, typename Block>
void mergeRange(const MergeArgs& args, int64_t begin, int64_t end) {
  auto* out = static_cast<Acc*>(args.out);
  auto* lse = static_cast<Acc*>(args.lse);
  const auto* block_out = static_cast<const Block*>(args.block_out);
  const auto* block_lse = static_cast<const Acc*>(args.block_lse);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = args.rows == nullptr ? token : args.rows[token];
    for (int64_t head = 0; head < args.heads; ++head) {
      Acc& running = lse[row * args.heads + head];
      const MergedRow<Acc> merged = mergeRow(
          running,
          block_lse[token * args.block_lse_token_stride + head * args.block_lse_head_stride]);
      running = merged.lse;
      if (merged.take == Acc(0)) continue;  // the row does not see the block, or it has no weight
      Blend<Acc, Block>::run(out + (row * args.heads + head) * args.dim,
                             block_out + (token * args.heads + head) * args.dim, merged.take,
                             args.dim);
    }
  }
}

template <typename Acc, typename Block>
void mergeAll(const MergeArgs& args, int num_threads) {
  forRows(args.tokens, args.tokens * args.heads * args.dim, num_threads,
          [&](int64_t begin, int64_t end) { mergeRange<Acc, Block>(args, begin, end); });
}

}  // namespace

void checkMerge(const MergeArgs& args) {
  const bool single = args.acc == DType::kFloat32 &&
                      (args.block == DType::kFloat32 || args.block == DType::kBFloat16 ||
                       args.block == DType::kFloat16);
  const bool twice = args.acc == DType::kFloat64 && args.block == DType::kFloat64;
  if (!single && !twice) {
    throwInvalidUsage(
        std::string("cannot merge a block of ") + dtypeName(args.block) + " into " +
        dtypeName(args.acc) +
        "; expected float32, bfloat16 or float16 into float32, or float64 into float64");
  }
  if (args.tokens < 0 || args.heads < 0 || args.dim < 0) {
    throwInvalidUsage(
        "sizes of a merge must not be negative; got tokens=" + std::to_string(args.tokens) +
        ", heads=" + std::to_string(args.heads) + ", dim=" + std::to_string(args.dim));
  }
}

void mergeCpu(const MergeArgs& args, int num_threads) {
  checkMerge(args);
  if (args.tokens == 0 || args.heads == 0) return;
  if (args.acc == DType::kFloat64) return mergeAll<double, double>(args, num_threads);
  withFloat(args.block, [&](auto value) { mergeAll<float, decltype(value)>(args, num_threads); });
}

}  // namespace hdpcomm::kernels
