// What 1F1B leaves idle on a rank whatever it runs (claim 11 of docs/bound.md; bound.cpp uses
// it). Pipelines that fill and drain with small micro-batches need many of them, and each one costs
// a fixed time.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

class PipelineRamps {
 public:
  static constexpr int kMost = 256;  // micro-batches of a rank

  // `least`, `most`: the forward pass's share of a micro-batch; `shortest`: its least seconds.
  PipelineRamps(const CostModel& cost, double least, double most, double shortest);

  // The longest micro-batches, for each second by which the way of the first ones down the stages
  // makes the pipeline idle, and counted from the end, the way of the last ones back.
  double rising(int i) const { return rising_[i]; }
  double falling(int i) const { return falling_[i]; }
  // The longest of any number of micro-batches, for each such second.
  double highest() const { return std::min(rising_.back(), falling_.back()); }

  // The heights of so many micro-batches that take the most for each second of idle time; the
  // highest one comes `later` by so many places.
  std::vector<double> heights(int count, int later) const;

  // The most seconds of work, without what each micro-batch costs, that a rank does within `time`.
  double mostWork(double time) const;

 private:
  // The most that so many micro-batches take, for a second of idle time: those before one of them
  // are limited by the way down alone, those after it by the way back.
  double mostOf(int count) const;

  // The longest micro-batches, one after the other, of which none makes the pipeline idle for more
  // than a second: `own` of its time is passed on `others` times, while `before` of as many shorter
  // ones run.
  static std::vector<double> ramp(int others, double own, double before);

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const double fixed_;
  const double shortest_;
  std::vector<double> rising_, falling_;
  std::vector<double> rose_{0.0}, fell_{0.0};  // sums of the first ones
  std::vector<double> sums_;  // by number of micro-batches: their seconds for a second of idle time
};

}  // namespace hdpcomm::planner
