// The maths of softmax cross-entropy in fp32, element by element.
//
// A row of logits x and its label t have the loss log(sum(exp(x))) - x_t and the gradient
// softmax(x)_j - [j == t]. The sum is kept online: (max, sum of exp(x - max)).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cross_entropy.hpp"
#include "kernels/host_device.hpp"
#include "kernels/numeric_elem.hpp"

namespace hdpcomm::kernels {

// e^x for x <= 0 (-inf gives 0, NaN stays NaN), to 2 units in the last place; results below 2^-126
// become 0. On a GPU one multiplication and one instruction; on the CPU a polynomial without
// branches, so that loops vectorise.
HDP_HOST_DEVICE float expNegative(float x) {
  constexpr float kLog2E = 1.44269504f;
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
  return result;
#else
  constexpr float kLowest = -87.33654f;  // ln(2^-126)
  const float clamped = x < kLowest ? kLowest : x;
  // Adding 1.5 * 2^23 rounds to an integer, whose value is then in the low bits.
  constexpr float kShift = 12582912.0f;
  const float shifted = clamped * kLog2E + kShift;
  const float n = shifted - kShift;
  // ln 2 in two parts (Cody and Waite); the first has few bits, so n times it is exact.
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  // Taylor series of e^r on |r| <= ln(2) / 2 up to r^7 / 5040: the rest is below 6e-9.
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = detail::floatFromBits((detail::bitsOf(shifted) + 127u) << 23);  // 2^n
  return x < kLowest ? 0.0f : p * power;
#endif
}

// A partial sum of a row's exponentials, relative to their maximum. Has no default values, since
// kernels keep it in shared memory, which takes no initializers.
struct OnlineSum {
  float max;
  float sum;  // of exp(x - max)
};

HDP_HOST_DEVICE OnlineSum emptySum() { return {-INFINITY, 0.0f}; }

// The value to subtract before the exponential: the maximum, or 0 if it is -inf, since -inf - -inf
// would be NaN, while exp(-inf - 0) = 0.
HDP_HOST_DEVICE float offsetOf(float max) { return max == -INFINITY ? 0.0f : max; }

HDP_HOST_DEVICE float larger(float a, float b) { return b > a ? b : a; }

HDP_HOST_DEVICE OnlineSum joinSums(OnlineSum a, OnlineSum b) {
  const float max = larger(a.max, b.max);
  const float offset = offsetOf(max);
  return {max, a.sum * expNegative(a.max - offset) + b.sum * expNegative(b.max - offset)};
}

// Shared by the gradients of all logits of a token.
struct TokenScale {
  float max;
  float share;  // scale / sum, so that share * exp(x - max) = scale * softmax(x)
  float scale;  // factor of the token's loss
};

HDP_HOST_DEVICE TokenScale scaleOf(OnlineSum row, float scale) {
  return {row.max, scale / row.sum, scale};
}

HDP_HOST_DEVICE float softmaxGradient(float logit, TokenScale token, bool is_label) {
  return token.share * expNegative(logit - token.max) - (is_label ? token.scale : 0.0f);
}

// Token `i` of args.loss and args.sums, from the stats of all shards in their order. Subtracts the
// label's logit from the maximum before adding the logarithm of the sum, since rounding would
// otherwise hide a small loss of large logits.
HDP_HOST_DEVICE void writeLoss(const CrossEntropyLossArgs& args, int64_t i) {
  OnlineSum row = emptySum();  // over the whole vocabulary
  float logit = 0.0f;
  for (int64_t s = 0; s < args.shards; ++s) {
    const float* of_shard = args.stats + 3 * s * args.tokens + i;
    row = joinSums(row, {of_shard[0], of_shard[args.tokens]});
    logit += of_shard[2 * args.tokens];
  }
  const float loss = (row.max - logit) + logf(row.sum);
  const bool ignored = args.labels[i] == args.ignore_index;
  args.sums[i] = row.max;
  args.sums[args.tokens + i] = row.sum;
  args.loss[i] = ignored ? 0.0f : loss * (args.weights == nullptr ? 1.0f : args.weights[i]);
}

// Whether a label is ignored, a column of this shard, of another shard, or outside the vocabulary.
enum class LabelKind : uint8_t { kIgnored, kHere, kElsewhere, kInvalid };

HDP_HOST_DEVICE LabelKind kindOf(const CrossEntropyShape& shape, int64_t label) {
  if (label == shape.ignore_index) return LabelKind::kIgnored;
  if (label < 0 || label >= shape.total_columns) return LabelKind::kInvalid;
  const int64_t column = label - shape.first_column;
  return column >= 0 && column < shape.columns ? LabelKind::kHere : LabelKind::kElsewhere;
}

}  // namespace hdpcomm::kernels
