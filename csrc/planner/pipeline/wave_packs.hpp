// The short sequences of a pipeline's plan: dealt to the ranks that the long sequences of its waves
// leave over, in packs that end with their waves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/pipeline/ranks_by_speed.hpp"
#include "planner/pipeline/wave_shape.hpp"

namespace hdpcomm::planner {

class WavePacks {
 public:
  using Lacking = std::pair<double, std::pair<int, int>>;  // (seconds, (wave, pack))

  // `used`: which of the jobs are in a wave by themselves; the others go into packs.
  WavePacks(const Problem& problem, const RanksBySpeed& by_speed, const std::vector<Job>& jobs,
            const std::vector<bool>& used)
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

  // Whether there are sequences for packs, of which none takes any time on one rank.
  bool takeNoTime() const { return any_ && !(work_ > 0); }
  // Seconds of a rank that all of them take; 0: there are none.
  double work() const { return work_; }
  // Seconds of a pack that is as full as memory allows.
  double full() const { return full_; }

  // Adds the seconds for which there is room in the packs of a wave.
  void addRoom(const Wave& wave, double& room) const {
    if (by_speed_.alike()) {
      room += std::min(wave.height, full_) * static_cast<double>(wave.packs.size());
      return;
    }
    for (size_t k = 0; k < wave.packs.size(); ++k) room += secondsOf(wave, k);
  }

  // What each pack is to get, of `room` seconds in all of them: those that get most first, of equal
  // ones the last one.
  std::vector<Lacking> shares(const std::vector<Wave>& waves, double room) const {
    const double scale = work_ / room;
    std::vector<size_t> order(waves.size());
    std::iota(order.begin(), order.end(), 0);
    const auto first_share = [&](size_t wave) {
      return waves[wave].packs.empty() ? 0 : secondsOf(waves[wave], 0);
    };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::make_pair(first_share(a), a) > std::make_pair(first_share(b), b);
    });
    std::vector<Lacking> lacking;
    for (const size_t w : order) {
      for (size_t k = waves[w].packs.size(); k-- > 0;) {
        lacking.push_back(
            {scale * secondsOf(waves[w], k), {static_cast<int>(w), static_cast<int>(k)}});
      }
    }
    if (!by_speed_.alike()) std::sort(lacking.begin(), lacking.end(), std::greater<>());
    return lacking;
  }

  // Deals the sequences to the packs, longest first, each to the pack that lacks most. What fits
  // nowhere gets waves of its own on the places from `first` on.
  void fill(std::vector<Wave>& waves, const std::vector<Lacking>& shares, int first) {
    std::vector<int32_t> first_of;  // by wave: the number of its first pack
    int32_t count = 0;
    for (const Wave& wave : waves) {
      first_of.push_back(count);
      count += static_cast<int32_t>(wave.packs.size());
    }
    std::vector<Load> packs(count);
    // The first one is that which lacks most, of equal ones the last one: both are negated.
    std::vector<RoundQueue::Entry> entries;
    entries.reserve(shares.size());
    for (const auto& [seconds, pack] : shares) {
      const int32_t number = first_of[pack.first] + pack.second;
      entries.push_back({-seconds, -number});
    }
    RoundQueue lacking(std::move(entries));
    std::vector<RoundQueue::Entry> passed;
    std::vector<int32_t> left_over;
    dealt_.clear();
    dealt_.reserve(jobs_.size());
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (used_[i]) continue;
      const Job& job = jobs_[i];
      passed.clear();
      bool placed = false;
      while (!placed && !lacking.empty() && passed.size() < kMaxProbes) {
        const RoundQueue::Entry entry = lacking.top();
        Load& pack = packs[-entry.second];
        if (pack.tokens + job.load.tokens > capacity()) {
          lacking.pop();
          passed.push_back(entry);
          continue;
        }
        pack += job.load;
        dealt_.push_back({-entry.second, job.sequence});
        placed = true;
        if (pack.tokens < capacity()) {
          lacking.replaceTop({entry.first + (job.min_size_s - cost_.params().fixed), entry.second});
        } else {
          lacking.pop();
        }
      }
      for (auto entry = passed.rbegin(); entry != passed.rend(); ++entry) lacking.putBack(*entry);
      if (!placed) left_over.push_back(job.sequence);
    }
    for (size_t i = 0; i < waves.size(); ++i) {
      std::copy_n(packs.begin() + first_of[i], waves[i].packs.size(), waves[i].packs.begin());
    }
    if (!left_over.empty()) addWaves(waves, left_over, first);
  }

  // What fill() dealt to each of so many packs, in the order of the waves and of their packs.
  std::vector<std::vector<int32_t>> sequences(size_t packs) const {
    std::vector<int32_t> counts(packs, 0);
    for (const Dealt& each : dealt_) ++counts[each.pack];
    std::vector<std::vector<int32_t>> sequences(packs);
    for (size_t i = 0; i < packs; ++i) sequences[i].reserve(counts[i]);
    for (const Dealt& each : dealt_) sequences[each.pack].push_back(each.sequence);
    return sequences;
  }

 private:
  static constexpr size_t kMaxProbes = 8;

  double capacity() const { return static_cast<double>(cost_.memory().capacity); }

  // Seconds of a pack at full speed that ends with the wave on its rank.
  double secondsOf(const Wave& wave, size_t pack) const {
    return std::min(wave.height * by_speed_.speed(wave.placeOf(pack)), full_);
  }

  void addWaves(std::vector<Wave>& waves, const std::vector<int32_t>& sequences, int first) {
    const auto count = static_cast<size_t>(by_speed_.count() - first);
    int32_t number = 0;  // of a pack
    for (const Wave& wave : waves) number += static_cast<int32_t>(wave.packs.size());
    const auto bins = packBestFit(problem_.lengths(), sequences, cost_.memory().capacity);
    for (size_t i = 0; i < bins.size(); ++i) {
      const size_t place = i % count;
      if (place == 0) {
        Wave wave;
        wave.first = wave.used = first;
        wave.last = by_speed_.count();
        wave.packs.resize(count);
        waves.push_back(std::move(wave));
      }
      Wave& wave = waves.back();
      Load& load = wave.packs[place];
      for (const int32_t sequence : bins[i]) {
        load += problem_.own(sequence);
        dealt_.push_back({number, sequence});
      }
      ++number;
      wave.height = std::max(
          wave.height, cost_.seconds(load, 1) / by_speed_.speed(first + static_cast<int>(place)));
    }
  }

  const Problem& problem_;
  const CostModel& cost_;
  const RanksBySpeed& by_speed_;
  const std::vector<Job>& jobs_;
  const std::vector<bool>& used_;
  bool any_ = false;
  double work_ = 0;
  double full_ = 0;
  struct Dealt {
    int32_t pack;
    int32_t sequence;
  };
  std::vector<Dealt> dealt_;  // in the order in which each pack has them
};

}  // namespace hdpcomm::planner
