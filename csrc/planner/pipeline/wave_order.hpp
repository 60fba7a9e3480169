// The order in which the waves of a plan drain and fill a pipeline fastest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <numeric>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"
#include "planner/pipeline/wave_shape.hpp"

namespace hdpcomm::planner {

// Makespan of micro-batches of these times on one pipeline under 1F1B.
class SinglePipeline {
 public:
  SinglePipeline(int stages, double forward) : stages_(stages), forward_(forward) {}

  using Times = std::deque<double>::const_iterator;
  double run(Times times, Times end) {
    const int count = static_cast<int>(end - times);
    given_.assign(count, 0.0);
    free_.assign(stages_, 0.0);
    // With passes of one second each, device s runs the forward pass of number i in second 2 i + s,
    // and its backward pass in second 2 (i + p) - 1 - s.
    for (int second = 0; second < 2 * (count + stages_) - 1; ++second) {
      for (int stage = second % 2; stage < stages_ && stage <= second; stage += 2) {
        const int i = (second - stage) / 2;
        if (i < count) pass(i, stage, forward_ * times[i]);
      }
      for (int stage = (second + 1) % 2; stage < stages_; stage += 2) {
        const int twice = second + 1 + stage - 2 * stages_;
        if (twice >= 0 && twice < 2 * count)
          pass(twice / 2, stage, (1 - forward_) * times[twice / 2]);
      }
    }
    return free_[0];
  }

 private:
  void pass(int i, int stage, double seconds) {
    const double end = std::max(given_[i], free_[stage]) + seconds;
    given_[i] = free_[stage] = end;
  }

  const int stages_;
  const double forward_;
  std::vector<double> given_;  // by micro-batch: when its last pass ends
  std::vector<double> free_;   // by device: when its last pass ends
};

class WaveOrder {
 public:
  // Waves beside a new one that decide at which end it costs less.
  static constexpr std::ptrdiff_t kNear = 64;

  explicit WaveOrder(const CostModel& cost) : cost_(cost) {}

  // Order of the waves that the last find() found.
  const std::vector<size_t>& waves() const { return order_; }
  // Seconds of a pipeline that runs them so at their full heights.
  double seconds() const { return seconds_; }

  // First the waves of the places before `reserved`, then those of the others, which have no
  // micro-batch in common. False if a pipeline takes longer than `limit` for them.
  bool find(const std::vector<Wave>& waves, int reserved, double limit) {
    std::vector<size_t> by_height(waves.size());
    std::iota(by_height.begin(), by_height.end(), 0);
    std::stable_sort(by_height.begin(), by_height.end(),
                     [&](size_t a, size_t b) { return waves[a].height > waves[b].height; });
    order_.clear();
    seconds_ = 0;
    for (const bool on_reserved : {true, false}) {
      std::vector<size_t> some;
      double seconds = 0;  // that the last stage works, at least
      for (const size_t wave : by_height) {
        if ((waves[wave].first < reserved) != on_reserved) continue;
        some.push_back(wave);
        seconds += waves[wave].height;
      }
      if (seconds > limit) return false;
      const std::deque<size_t> order = outwards(waves, some, seconds);
      if (seconds > limit) return false;
      seconds_ = std::max(seconds_, seconds);
      order_.insert(order_.end(), order.begin(), order.end());
    }
    return true;
  }

 private:
  // From the highest wave outwards: each goes to the end where it costs less. `seconds`: of a rank
  // of these heights.
  std::deque<size_t> outwards(const std::vector<Wave>& waves, const std::vector<size_t>& some,
                              double& seconds) const {
    SinglePipeline pipeline(cost_.cluster().pipeline, cost_.params().forward);
    std::deque<double> times;
    std::deque<size_t> order;
    double without_front = 0, without_back = 0;  // of many waves, those next to this end
    for (const size_t wave : some) {
      const auto before = static_cast<std::ptrdiff_t>(times.size());
      const std::ptrdiff_t near = std::min(before, kNear);
      const bool many = before > kNear;
      if (before == kNear + 1) {
        without_front = pipeline.run(times.begin(), times.begin() + kNear);
        without_back = pipeline.run(times.end() - kNear, times.end());
      }
      times.push_front(waves[wave].height);
      double front = pipeline.run(times.begin(), times.begin() + near + 1);
      times.pop_front();
      times.push_back(waves[wave].height);
      double back = pipeline.run(times.end() - near - 1, times.end());
      if (many) {
        front -= without_front;
        back -= without_back;
      }
      seconds = std::min(front, back);
      if (back <= front) {
        order.push_back(wave);
        if (many) without_back = pipeline.run(times.end() - kNear, times.end());
      } else {
        times.pop_back();
        times.push_front(waves[wave].height);
        order.push_front(wave);
        if (many) without_front = pipeline.run(times.begin(), times.begin() + kNear);
      }
    }
    if (std::ssize(some) > kNear + 1) seconds = pipeline.run(times.begin(), times.end());
    return order;
  }

  const CostModel& cost_;
  std::vector<size_t> order_;
  double seconds_ = 0;
};

}  // namespace hdpcomm::planner
