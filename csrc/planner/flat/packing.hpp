// Where the sequences of a step run: what packers find, and micro-batches of it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Ranks that wait until the last rank of their group is free; smaller jobs may run there meanwhile.
struct Gap {
  double start = 0;
  double until = 0;
  int first = 0;
  int count = 0;
  double speed = 1;
};

// Where one rank runs short sequences one after the other, from `start` on.
struct Slot {
  double start = 0;
  int rank = 0;
};

// Where the short jobs are: those from `first` on.
struct ShortJobs {
  size_t first = 0;
  std::vector<int32_t> slot_of;  // of each
  std::vector<Slot> slots;
};

// Deals the short sequences of a step to ranks, one rank each: first into the gaps that longer ones
// leave, then onto the ranks that end them first.
class ShortFiller {
 public:
  ShortFiller(const CostModel& cost, const std::vector<Job>& jobs);

  // What place() cannot end before: the last rank of a block, and the mean of all ranks if
  // the gaps are filled without rest. `Blocks`: BlockList, or a vector of Block.
  template <class Blocks>
  double leastEnd(size_t next, const std::vector<Gap>& gaps, const Blocks& blocks) const;

  // Places the jobs from `next` on, which take one rank each: into the gaps, then onto the ranks
  // that end them first. Returns the makespan of all jobs; a run that cannot end before `limit` is
  // given up.
  template <class Blocks>
  double place(size_t next, const std::vector<Gap>& gaps, const Blocks& blocks, double limit);

  // The result of the last run, which this takes away.
  ShortJobs take() { return std::exchange(found_, {}); }

 private:
  // With its share of what a full micro-batch costs beside its sequences.
  double timeOf(const Job& job) const;

  // Speeds that differ by a few per cent only are in one class.
  static int speedClass(double speed);

  const CostModel& cost_;
  const std::vector<Job>& jobs_;
  std::vector<double> work_;  // of the jobs from each one on
  ShortJobs found_;
};

// Neighbouring ranks.
struct RankRange {
  int first = 0;
  int count = 0;
};

struct Placement {
  int32_t job = 0;
  double start = 0;
  RankRange ranks;
  std::vector<RankRange> more;  // where these are not all
};

// Where all jobs of a run are.
struct Packing {
  std::vector<Placement> placements;
  ShortJobs short_jobs;
};

// The micro-batches of all jobs.
std::vector<MicroBatch> collectPlaced(const Problem& problem, const std::vector<Job>& jobs,
                                      const Packing& packing);

}  // namespace hdpcomm::planner
