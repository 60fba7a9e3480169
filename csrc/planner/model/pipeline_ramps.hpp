// What 1F1B leaves idle on a rank whatever it runs (claim 11 of docs/bound.md; bound.cpp uses
// it). Pipelines that fill and drain with small micro-batches need many of them, and each one costs
// a fixed time.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

// The stages of a pipeline, in passes of the stage whose costs are looked at.
struct StagesInPasses {
  double all;         // of a micro-batch, on all stages
  double before;      // on those before the device whose work is counted, or before its first slice
  double between;     // of ramps: from the first device that is looked at to the last one
  int micro_batches;  // others that this first device may have under way meanwhile

  // Where all stages are alike.
  explicit StagesInPasses(const Cluster& cluster)
      : all(cluster.pipeline),
        before((cluster.pipeline - 1.0) / cluster.chunks),
        between(cluster.pipeline - 1.0),
        micro_batches(cluster.pipeline - 1) {}
};

class PipelineRamps {
 public:
  static constexpr int kMost = 256;  // micro-batches of a rank

  // `least`, `most`: the forward pass's share of a micro-batch; `shortest`: its least seconds.
  PipelineRamps(const CostModel& cost, const StagesInPasses& stages, double least, double most,
                double shortest)
      : fixed_(cost.params().fixed), shortest_(shortest) {
    rising_ = ramp(stages, least, 1 - least);
    falling_ = ramp(stages, 1 - most, most);
    for (int i = 0; i < kMost; ++i) {
      rose_.push_back(rose_.back() + rising_[i]);
      fell_.push_back(fell_.back() + falling_[i]);
    }
    for (int count = 1; count <= kMost; ++count) sums_.push_back(mostOf(count));
  }

  // The longest micro-batches, for each second by which the way of the first ones down the stages
  // makes the pipeline idle, and counted from the end, the way of the last ones back.
  double rising(int i) const { return rising_[i]; }
  double falling(int i) const { return falling_[i]; }
  // The longest of any number of micro-batches, for each such second.
  double highest() const { return std::min(rising_.back(), falling_.back()); }

  // The heights of so many micro-batches that take the most for each second of idle time; the
  // highest one comes `later` by so many places.
  std::vector<double> heights(int count, int later) const {
    int top = 0;
    while (top + 1 < count && rose_[top + 1] < fell_[count - 1 - top]) ++top;
    top = std::clamp(top + later, 0, count - 1);
    const double ratio = falling_[count - 1 - top] / rising_[top];
    std::vector<double> heights;
    for (int i = 0; i < count; ++i) {
      heights.push_back(std::min(ratio * rising_[i], falling_[count - 1 - i]));
    }
    return heights;
  }

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
  // The most that so many micro-batches take, for a second of idle time: those before one of them
  // are limited by the way down alone, those after it by the way back.
  double mostOf(int count) const {
    int one = 0;
    while (one + 1 < count && rose_[one + 1] < fell_[count - 1 - one]) ++one;
    // With all of its limit from the way back, with all of it from the way down, or with a part.
    const double without = std::max(rose_[one], fell_[count - one]);
    const double with = std::max(rose_[one + 1], fell_[count - 1 - one]);
    const double more = rising_[one];
    const double less = falling_[count - 1 - one];
    if (!(more + less < kForever)) return std::min(without, with);
    const double part = std::clamp((fell_[count - one] - rose_[one]) / (more + less), 0.0, 1.0);
    return std::max(rose_[one] + part * more, fell_[count - 1 - one] + (1 - part) * less);
  }

  // The longest micro-batches, one after the other, of which none makes the pipeline idle for more
  // than a second: `own` of its time is passed on between the devices, while `before` of a few
  // shorter ones run.
  static std::vector<double> ramp(const StagesInPasses& stages, double own, double before) {
    std::vector<double> times;
    for (int i = 0; i < kMost; ++i) {
      const auto first = times.begin() + std::max(0, i - stages.micro_batches);
      const double shorter = before * std::accumulate(first, times.end(), 0.0);
      times.push_back((1 + shorter) / (stages.between * own));
    }
    return times;
  }

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const double fixed_;
  const double shortest_;
  std::vector<double> rising_, falling_;
  std::vector<double> rose_{0.0}, fell_{0.0};  // sums of the first ones
  std::vector<double> sums_;  // by number of micro-batches: their seconds for a second of idle time
};

}  // namespace hdpcomm::planner
