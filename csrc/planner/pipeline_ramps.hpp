// What 1F1B leaves idle on a rank whatever it runs (claim 11 of docs/planner.md; bound.cpp uses
// it). Pipelines that fill and drain with small micro-batches need many of them, and each one costs
// a fixed time.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner/plan.hpp"

namespace hdpcomm::planner {

class PipelineRamps {
 public:
  // `least`, `most`: the forward pass's share of a micro-batch; `shortest`: its least seconds.
  PipelineRamps(const CostModel& cost, double least, double most, double shortest)
      : fixed_(cost.params().fixed), shortest_(shortest) {
    const int others = cost.cluster().pipeline - 1;
    rising_ = ramp(others, least, 1 - least);
    falling_ = ramp(others, 1 - most, most);
    for (int count = 1; count <= kMost; ++count) {
      double sum = 0;
      for (int i = 0; i < count; ++i) sum += height(i, count);
      sums_.push_back(sum);
    }
  }

  // The longest micro-batches, for each second by which the way of the first ones down the stages
  // makes the pipeline idle, and counted from the end, the way of the last ones back.
  double rising(int i) const { return rising_[i]; }
  double falling(int i) const { return falling_[i]; }
  // The longest of any number of micro-batches, for each such second.
  double highest() const { return std::min(rising_.back(), falling_.back()); }

  // The most seconds of work, without what each micro-batch costs, that a rank does within `time`.
  double mostWork(double time) const {
    double most = 0;
    for (int count = 1; count <= kMost; ++count) {
      const double busy = time / (1 + 1 / sums_[count - 1]);
      if (busy < count * shortest_) continue;
      most = std::max(most, busy - count * fixed_);
    }
    const bool more = time >= (kMost + 1) * shortest_;  // are possible
    return more ? std::max(most, time - (kMost + 1) * fixed_) : most;
  }

 private:
  double height(int i, int count) const {
    return 1 / (1 / rising_[i] + 1 / falling_[count - 1 - i]);
  }

  // The longest micro-batches, one after the other, of which none makes the pipeline idle for more
  // than a second: `own` of its time is passed on `others` times, while `before` of as many shorter
  // ones run.
  static std::vector<double> ramp(int others, double own, double before) {
    std::vector<double> times;
    for (int i = 0; i < kMost; ++i) {
      const auto first = times.begin() + std::max(0, i - others);
      times.push_back((1 + before * std::accumulate(first, times.end(), 0.0)) / (others * own));
    }
    return times;
  }

  static constexpr int kMost = 256;  // micro-batches of a rank

  const double fixed_;
  const double shortest_;
  std::vector<double> rising_, falling_;
  std::vector<double> sums_;  // by number of micro-batches: their seconds for a second of idle time
};

}  // namespace hdpcomm::planner
