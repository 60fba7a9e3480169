#include "planner/pipeline/wave_order.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>

#include "planner/pipeline/single_pipeline.hpp"

namespace hdpcomm::planner {

bool WaveOrder::find(const std::vector<Wave>& waves, int reserved, double limit) {
  std::vector<size_t> by_height(waves.size());
  std::iota(by_height.begin(), by_height.end(), 0);
  std::stable_sort(by_height.begin(), by_height.end(),
                   [&](size_t a, size_t b) { return waves[a].height > waves[b].height; });
  order_.clear();
  seconds_ = 0;
  for (const bool on_reserved : {true, false}) {
    std::vector<size_t> some;
    double seconds = 0;  // that the last stage works, at least
    double others = 0;   // slices but the first: they follow each other like micro-batches
    for (const size_t wave : by_height) {
      if ((waves[wave].first < reserved) != on_reserved) continue;
      some.push_back(wave);
      seconds += waves[wave].height;
      others += (waves[wave].slices - 1) * waves[wave].height;
    }
    if (seconds + others > limit) return false;
    const std::deque<size_t> order = outwards(waves, some, seconds);
    seconds += others;
    if (seconds > limit) return false;
    seconds_ = std::max(seconds_, seconds);
    order_.insert(order_.end(), order.begin(), order.end());
  }
  return true;
}

std::deque<size_t> WaveOrder::outwards(const std::vector<Wave>& waves,
                                       const std::vector<size_t>& some, double& seconds) const {
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

void turnWaves(std::vector<Wave>& waves, const Problem& problem) {
  std::vector<double> busy(problem.ranks(), 0.0);
  std::vector<double> times;
  for (Wave& wave : waves) {
    times.clear();
    for (const Wave::Wide& wide : wave.wide) {
      times.insert(times.end(), wide.size, wave.slices * wide.seconds);
    }
    for (size_t k = 0; k < wave.packs.size(); ++k) {
      const Load& load = wave.packs[k];
      const double seconds = load.tokens > 0 ? problem.cost().seconds(load, 1) : 0;
      if (wave.placeOf(k) - wave.first < static_cast<int>(times.size())) {
        times.back() += seconds;
      } else {
        times.push_back(seconds);
      }
    }
    double difference = 0;
    const int last = static_cast<int>(times.size()) - 1;
    for (int i = 0; i <= last; ++i)
      difference += busy[wave.first + i] * (times[i] - times[last - i]);
    wave.turned = difference > 0;
    for (int i = 0; i <= last; ++i) busy[wave.first + i] += times[wave.turned ? last - i : i];
  }
}

}  // namespace hdpcomm::planner
