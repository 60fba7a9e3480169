// Chooses the cheapest algorithm under any estimate of costs.
#pragma once

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "collective/schedule.hpp"

namespace hdpcomm::collective {

// The algorithms to choose among. Ragged all_to_all has one: the others need blocks of one size.
inline std::span<const Algorithm> candidatesOf(const ScheduleRequest& request) {
  static constexpr Algorithm kRagged[] = {Algorithm::kDirect};
  if (request.op == OpCode::kAllToAll && !request.in_counts.empty()) return kRagged;
  const std::vector<Algorithm>& all = algorithmsOf(request.op);
  if (all.empty()) throwInvalidUsage(std::string(opName(request.op)) + " has no algorithms");
  return all;
}

// The candidate with the lowest estimate, the first of equal ones, so that ranks with equal costs
// choose alike. At least one candidate is given.
template <typename SecondsOf>
Algorithm cheapest(std::span<const Algorithm> candidates, SecondsOf seconds_of) {
  Algorithm best = candidates[0];
  double best_seconds = std::numeric_limits<double>::infinity();
  for (const Algorithm candidate : candidates) {
    const double seconds = seconds_of(candidate);
    if (seconds < best_seconds) {
      best = candidate;
      best_seconds = seconds;
    }
  }
  return best;
}

}  // namespace hdpcomm::collective
