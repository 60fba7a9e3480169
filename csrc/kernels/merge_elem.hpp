// Merging two partial softmax attentions: the maths of one row and of one element.
//
// A block of keys gives (out_b, lse_b), lse_b = log(sum(exp(scores))). Two blocks combine to
//   lse' = log(exp(lse) + exp(lse_b)), out' = out + take * (out_b - out), take = exp(lse_b - lse').
// A block that a row cannot see has lse_b = -inf and leaves the row as it is.
#pragma once

#include <cmath>

#include "kernels/host_device.hpp"

namespace hdpcomm::kernels {

template <typename Acc>
struct MergedRow {
  Acc lse;   // of both
  Acc take;  // weight of the block, in [0, 1]
};

HDP_HOST_DEVICE float expOf(float x) { return expf(x); }
HDP_HOST_DEVICE double expOf(double x) { return exp(x); }
HDP_HOST_DEVICE float log1pOf(float x) { return log1pf(x); }
HDP_HOST_DEVICE double log1pOf(double x) { return log1p(x); }

template <typename Acc>
HDP_HOST_DEVICE MergedRow<Acc> mergeRow(Acc lse, Acc block_lse) {
  const Acc kNothing = -static_cast<Acc>(INFINITY);
  if (block_lse == kNothing) return {lse, Acc(0)};
  if (lse == kNothing) return {block_lse, Acc(1)};
  const Acc difference = block_lse - lse;
  const Acc ratio = expOf(difference > Acc(0) ? -difference : difference);  // <= 1, NaN stays NaN
  const Acc take = (difference > Acc(0) ? Acc(1) : ratio) / (Acc(1) + ratio);
  return {(difference > Acc(0) ? block_lse : lse) + log1pOf(ratio), take};
}

// A weight of 1 copies the block, so a running result without any keys yet (lse is -inf) may be
// uninitialised.
template <typename Acc>
HDP_HOST_DEVICE Acc mergeElement(Acc out, Acc block_out, Acc take) {
  return take == Acc(1) ? block_out : out + take * (block_out - out);
}

}  // namespace hdpcomm::kernels
