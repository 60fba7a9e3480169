// Packs the sequences of a step in waves that follow each other, or around those that are placed
// already.
#pragma once

#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "planner/flat/packing.hpp"
#include "planner/flat/short_filler.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class WavePacker {
 public:
  // The jobs are all there, in their order.
  WavePacker(const Problem& problem, const std::vector<Job>& jobs);

  // Places the first jobs in waves that follow each other, each over all ranks: `counts` jobs to
  // a wave, with the sizes that make the wave shortest. The other jobs have to be short. With
  // `turned`, every other wave has its longest jobs at the other end, and the sizes of the last one
  // make all of its jobs end together. A run that cannot end before `limit` is given up: it returns
  // a time that is not below it.
  double runWaves(const std::vector<int>& counts, bool turned, double limit);

  // Places the jobs from `next` on, all of them short, around those that are placed already;
  // `ready`: when these leave each rank free.
  double runPlaced(std::vector<Placement> placements, const std::vector<double>& ready,
                   size_t next);

  // The result of the last run, which this takes away.
  Packing take() { return {std::exchange(placements_, {}), filler_.take()}; }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // Sizes of `count` jobs from `next` on that run side by side, with the least longest time.
  const std::vector<int>& sizesOfWave(size_t next, int count);

  std::vector<int> findSizes(size_t next, int count) const;

  // Sizes of jobs from `next` on, side by side on ranks that are free at different times, with
  // which the last one of them ends as early as possible. `sizes` are some that fit; `backwards`:
  // the last job comes first.
  std::vector<int> levelSizes(size_t next, std::vector<int> sizes, bool backwards,
                              const std::vector<double>& ready) const;

  double endAt(const Job& job, int first, int size, const std::vector<double>& ready) const;

  // The fewest ranks from `first` on with which the job ends by a target time; 0 if there are none.
  int sizeAt(const Job& job, int first, const std::vector<double>& ready, double target) const;

  double fillUp(const std::vector<double>& ready, size_t next, double limit);

  // Calls `use(block)` for the neighbouring ranks of one speed that are free at the same time.
  template <class Use>
  void forEachBlock(const std::vector<double>& ready, int first, int last, const Use& use) const;

  const Problem& problem_;
  const CostModel& cost_;
  const std::vector<Job>& jobs_;
  ShortFiller filler_;
  std::vector<Placement> placements_;
  std::vector<Gap> gaps_;
  std::map<std::pair<size_t, int>, std::vector<int>> wave_sizes_;  // of sizesOfWave()
};

}  // namespace hdpcomm::planner
