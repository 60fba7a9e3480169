// The choice among algorithms, whatever their costs are counted by.
#pragma once

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "collective/schedule.hpp"

namespace hdpcomm::collective {

// The schedules to choose among. Ragged all_to_all has one: the others need blocks of one size.
inline std::span<const Algorithm> candidatesOf(const ScheduleRequest& request) {
  static constexpr Algorithm kRagged[] = {Algorithm::kDirect};
  if (request.op == OpCode::kAllToAll && !request.in_counts.empty()) return kRagged;
  const std::vector<Algorithm>& all = algorithmsOf(request.op);
  if (all.empty()) throwInvalidUsage(std::string(opName(request.op)) + " has no algorithms");
  return all;
}

// The candidate (there is at least one) of the fewest seconds, the first among equals: the same on
// all ranks with equal costs.
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
