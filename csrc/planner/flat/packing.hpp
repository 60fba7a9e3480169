// Where the sequences of a step run: what packers find, and micro-batches of it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/flat/short_filler.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

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

// The micro-batch of each placement.
std::vector<MicroBatch> placedBatches(const Problem& problem, const std::vector<Job>& jobs,
                                      const std::vector<Placement>& placements);

// The micro-batches of all jobs.
std::vector<MicroBatch> collectPlaced(const Problem& problem, const std::vector<Job>& jobs,
                                      const Packing& packing);

}  // namespace hdpcomm::planner
