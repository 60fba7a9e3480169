// The policies that others have, and what `balanced` is compared with: a fixed mesh, Algorithm 1 of
// the paper, and groups of 2^k ranks.
#pragma once

#include <cstdint>
#include <limits>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Options that only `static` reads.
struct PolicyOptions {
  int64_t context = 0;    // longest sequence that the mesh has to hold; 0: of this batch
  int context_ranks = 0;  // size of the context-parallel groups; 0: the smallest that fits
  bool baselines = true;  // "balanced" takes a plan of static, naive or pow2 where one is shorter
};

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// Makespans that the plans of these policies cannot beat, much quicker to find than the plans.
double leastStatic(const Problem& problem, const PolicyOptions& options);
double leastNaive(const Problem& problem);
double leastPow2(const Problem& problem);

// Plans that end no earlier than `limit` may have another makespan, as finishPlan() says.
Plan planStatic(const Problem& problem, const PolicyOptions& options, double limit = kNoLimit);
Plan planNaive(const Problem& problem, double limit = kNoLimit);
Plan planPow2(const Problem& problem, double limit = kNoLimit);

}  // namespace hdpcomm::planner
