// The short sequences of a pipeline's plan: dealt to the ranks that the long sequences of its waves
// leave over, in packs that end with their waves.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/problem.hpp"
#include "planner/pipeline/ranks_by_speed.hpp"
#include "planner/pipeline/wave.hpp"

namespace hdpcomm::planner {

class WavePacks {
 public:
  using Lacking = std::pair<double, std::pair<int, int>>;  // (seconds, (wave, pack))

  // `used`: which of the jobs are in a wave by themselves; the others go into packs.
  WavePacks(const Problem& problem, const RanksBySpeed& by_speed, const std::vector<Job>& jobs,
            const std::vector<bool>& used);

  // Whether there are sequences for packs, of which none takes any time on one rank.
  bool takeNoTime() const { return any_ && !(work_ > 0); }
  // Seconds of a rank that all of them take; 0: there are none.
  double work() const { return work_; }
  // Seconds of a pack that is as full as memory allows.
  double full() const { return full_; }

  // Adds the seconds for which there is room in the packs of a wave.
  void addRoom(const Wave& wave, double& room) const;

  // What each pack is to get, of `room` seconds in all of them: those that get most first, of equal
  // ones the last one.
  std::vector<Lacking> shares(const std::vector<Wave>& waves, double room) const;

  // Deals the sequences to the packs, longest first, each to the pack that lacks most. What fits
  // nowhere gets waves of its own on the places from `first` on.
  void fill(std::vector<Wave>& waves, const std::vector<Lacking>& shares, int first);

  // What fill() dealt to each of so many packs, in the order of the waves and of their packs.
  std::vector<std::vector<int32_t>> sequences(size_t packs) const;

 private:
  static constexpr size_t kMaxProbes = 8;

  double capacity() const { return static_cast<double>(cost_.memory().capacity); }

  // Seconds of a pack at full speed that ends with the wave on its rank.
  double secondsOf(const Wave& wave, size_t pack) const;

  void addWaves(std::vector<Wave>& waves, const std::vector<int32_t>& sequences, int first);

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
