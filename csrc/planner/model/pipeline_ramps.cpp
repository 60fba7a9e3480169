#include "planner/model/pipeline_ramps.hpp"

#include <numeric>

namespace hdpcomm::planner {

PipelineRamps::PipelineRamps(const CostModel& cost, double least, double most, double shortest)
    : fixed_(cost.params().fixed), shortest_(shortest) {
  const int others = cost.cluster().pipeline - 1;
  rising_ = ramp(others, least, 1 - least);
  falling_ = ramp(others, 1 - most, most);
  for (int i = 0; i < kMost; ++i) {
    rose_.push_back(rose_.back() + rising_[i]);
    fell_.push_back(fell_.back() + falling_[i]);
  }
  for (int count = 1; count <= kMost; ++count) sums_.push_back(mostOf(count));
}

std::vector<double> PipelineRamps::heights(int count, int later) const {
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

double PipelineRamps::mostWork(double time) const {
  double most = 0;
  for (int count = 1; count <= kMost; ++count) {
    const double busy = time / (1 + 1 / sums_[count - 1]);
    if (busy < count * shortest_) continue;
    most = std::max(most, busy - count * fixed_);
  }
  const bool more = time >= (kMost + 1) * shortest_;  // are possible
  return more ? std::max(most, time - (kMost + 1) * fixed_) : most;
}

double PipelineRamps::mostOf(int count) const {
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

std::vector<double> PipelineRamps::ramp(int others, double own, double before) {
  std::vector<double> times;
  for (int i = 0; i < kMost; ++i) {
    const auto first = times.begin() + std::max(0, i - others);
    times.push_back((1 + before * std::accumulate(first, times.end(), 0.0)) / (others * own));
  }
  return times;
}

}  // namespace hdpcomm::planner
