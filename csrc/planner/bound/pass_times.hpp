// The least seconds of a sequence's forward and backward passes, each on the number of ranks that
// is best for it: no micro-batch that holds the sequence passes a stage in less. Where it may run
// in slices, those of the longest slice, or with several stages on a device of the first one.
#pragma once

#include <array>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

class PassTimes {
 public:
  PassTimes(const CostModel& cost, const Load& load, int least, int ranks);

  // The longest pass of a sequence in as many slices as it may have, on `first` to `last` ranks,
  // numbers with one leastScope().
  static double longest(const CostModel& cost, const Load& load, int first, int last,
                        bool backward);

  // A sequence alone on its ranks, in as many slices as end first: its passes, and together with
  // what a rank is idle for where it runs this one first, last, or no other one.
  struct Job {
    double passes, first, last, only;

    bool noLongerThan(const Job& other) const {
      return passes <= other.passes && first <= other.first && last <= other.last &&
             only <= other.only;
    }
  };
  // The least of each, on `first` to `last` ranks, numbers with one leastScope(), which hold `held`
  // tokens of a micro-batch each. With one stage on a device.
  static Job inSlices(const CostModel& cost, const Load& load, int first, int last, double held);
  // No more than these, found much faster.
  static Job leastInSlices(const CostModel& cost, const Load& load, int first, int last);

  // How many times as long as the slice that begins it a sequence takes, at most, if that alone is
  // what a rank waits for; with one stage on a device, as the longest one.
  static double timesFirstSlice(const Cluster& cluster);

  double forwardWithin(int ranks) const { return pass(ranks, false); }
  // Both together, on at most `ranks` ranks.
  double within(int ranks) const { return pass(ranks, false) + pass(ranks, true); }

 private:
  double pass(int ranks, bool backward) const;

  double seconds(int size, bool backward) const;

  // A pass is quasi-convex in the number of ranks (claim 4).
  int fastest(int first, int last, bool backward) const;

  const CostModel& cost_;
  const Load load_;
  const int least_;
  const std::array<int, 3> borders_;
  int fastest_[2][3];  // in each range of sizes with one scope
};

}  // namespace hdpcomm::planner
