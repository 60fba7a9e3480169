// What no plan can beat whose long sequences have groups of given sizes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The even split of all work, or the longest group on all devices of its ranks, one after the
// other; `size_of` gives the ranks of a sequence that does not fit into one.
template <typename SizeOf>
double leastStep(const Problem& problem, SizeOf size_of) {
  const CostModel& cost = problem.cost();
  const int64_t capacity = cost.memory().capacity;
  double work = 0;
  double longest = 0;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (problem.lengths()[i] <= capacity) {
      work += cost.leastWork(problem.load(i));
    } else if (!problem.rides(i)) {
      const int size = size_of(i);
      const double time = cost.seconds(problem.load(i), size);
      work += size * time;
      longest = std::max(longest, time);
    }
  }
  return std::max(work / problem.ranks(), longest * cost.cluster().pipeline);
}

}  // namespace hdpcomm::planner
