#include "planner/pipeline/wave_packs.hpp"

#include <algorithm>
#include <functional>
#include <queue>

#include "planner/model/plan.hpp"

namespace hdpcomm::planner {

WavePacks::WavePacks(const Problem& problem, const RanksBySpeed& by_speed,
                     const std::vector<Job>& jobs, const std::vector<bool>& used)
    : problem_(problem), cost_(problem.cost()), by_speed_(by_speed), jobs_(jobs), used_(used) {
  double seconds = 0;
  double tokens = 0;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (used_[i]) continue;
    any_ = true;
    work_ += jobs_[i].min_size_s;
    seconds += jobs_[i].min_size_s - cost_.params().fixed;
    tokens += jobs_[i].load.tokens;
  }
  if (tokens > 0) full_ = 0.97 * capacity() * seconds / tokens + cost_.params().fixed;
}

void WavePacks::addRoom(const Wave& wave, double& room) const {
  if (by_speed_.alike()) {
    room += std::min(wave.height, full_) * static_cast<double>(wave.packs.size());
    return;
  }
  for (size_t k = 0; k < wave.packs.size(); ++k) room += secondsOf(wave, k);
}

std::vector<WavePacks::Lacking> WavePacks::shares(const std::vector<Wave>& waves,
                                                  double room) const {
  const double scale = work_ / room;
  std::vector<Lacking> lacking;
  for (size_t w = 0; w < waves.size(); ++w) {
    for (size_t k = 0; k < waves[w].packs.size(); ++k) {
      lacking.push_back(
          {scale * secondsOf(waves[w], k), {static_cast<int>(w), static_cast<int>(k)}});
    }
  }
  return lacking;
}

void WavePacks::fill(std::vector<Wave>& waves, std::vector<Lacking> entries, int first) const {
  std::priority_queue<Lacking> lacking(std::less<Lacking>(), std::move(entries));
  std::vector<std::vector<double>> tokens;
  for (const Wave& wave : waves) tokens.emplace_back(wave.packs.size(), 0.0);
  std::vector<Lacking> passed;
  std::vector<int32_t> left_over;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (used_[i]) continue;
    const Job& job = jobs_[i];
    passed.clear();
    bool placed = false;
    while (!placed && !lacking.empty() && passed.size() < kMaxProbes) {
      Lacking entry = lacking.top();
      lacking.pop();
      const auto [w, k] = entry.second;
      if (tokens[w][k] + job.load.tokens <= capacity()) {
        tokens[w][k] += job.load.tokens;
        waves[w].packs[k].push_back(job.sequence);
        entry.first -= job.min_size_s - cost_.params().fixed;
        placed = true;
      }
      passed.push_back(entry);
    }
    for (const Lacking& entry : passed) {
      const auto [w, k] = entry.second;
      if (tokens[w][k] < capacity()) lacking.push(entry);
    }
    if (!placed) left_over.push_back(job.sequence);
  }
  if (!left_over.empty()) addWaves(waves, left_over, first);
}

double WavePacks::secondsOf(const Wave& wave, size_t pack) const {
  return std::min(wave.height * by_speed_.speed(wave.used + static_cast<int>(pack)), full_);
}

void WavePacks::addWaves(std::vector<Wave>& waves, const std::vector<int32_t>& sequences,
                         int first) const {
  const auto count = static_cast<size_t>(by_speed_.count() - first);
  auto bins = packBestFit(problem_.lengths(), sequences, cost_.memory().capacity);
  for (size_t i = 0; i < bins.size(); ++i) {
    const size_t place = i % count;
    if (place == 0) {
      Wave wave;
      wave.first = wave.used = first;
      wave.last = by_speed_.count();
      wave.packs.resize(count);
      waves.push_back(std::move(wave));
    }
    Load load;
    for (const int32_t sequence : bins[i]) load += problem_.own(sequence);
    Wave& wave = waves.back();
    wave.height = std::max(
        wave.height, cost_.seconds(load, 1) / by_speed_.speed(first + static_cast<int>(place)));
    wave.packs[place] = std::move(bins[i]);
  }
}

}  // namespace hdpcomm::planner
