// The least seconds of a sequence's forward and backward passes, each on the number of ranks that
// is best for it: no micro-batch that holds the sequence passes a stage in less.
#pragma once

#include <algorithm>
#include <limits>

#include "planner/cost_model.hpp"

namespace hdpcomm::planner {

class PassTimes {
 public:
  PassTimes(const CostModel& cost, const Load& load, int least, int ranks)
      : cost_(cost), load_(load), least_(least), node_(cost.cluster().ranks_per_node) {
    for (const bool backward : {false, true}) {
      inside_[backward] = fastest(least, std::min(node_, ranks), backward);
      beyond_[backward] = fastest(std::max(least, node_ + 1), ranks, backward);
    }
  }

  double forwardWithin(int ranks) const { return pass(ranks, false); }
  // Both together, on at most `ranks` ranks.
  double within(int ranks) const { return pass(ranks, false) + pass(ranks, true); }

 private:
  double pass(int ranks, bool backward) const {
    double least = std::numeric_limits<double>::infinity();
    if (least_ <= std::min(ranks, node_)) {
      least = seconds(std::min({inside_[backward], ranks, node_}), backward);
    }
    if (ranks > node_ && ranks >= least_) {
      least = std::min(least, seconds(std::min(beyond_[backward], ranks), backward));
    }
    return least;
  }

  double seconds(int size, bool backward) const {
    const CostParams& params = cost_.params();
    const double compute = cost_.stepCompute(load_, size);
    const double transfer = cost_.stepTransfer(load_, size, size <= node_);
    const double rest = size * compute + params.linear * load_.tokens / size + params.fixed +
                        (size - 1) * params.ring_step;
    return backward
               ? (1 - params.forward) * rest + (size - 1) * cost_.backwardWait(compute, transfer)
               : params.forward * rest + (size - 1) * cost_.forwardWait(compute, transfer);
  }

  // A pass is quasi-convex in the number of ranks (claim 4).
  int fastest(int first, int last, bool backward) const {
    while (first < last) {
      const int middle = first + (last - first) / 2;
      if (seconds(middle + 1, backward) < seconds(middle, backward)) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }

  const CostModel& cost_;
  const Load load_;
  const int least_;
  const int node_;
  int inside_[2];
  int beyond_[2];
};

}  // namespace hdpcomm::planner
