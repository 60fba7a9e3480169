// Local search on plans, which never makes them longer.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Improves a plan of few micro-batches without slices by simulated annealing.
Plan refine(const Problem& problem, Plan plan, double lower_bound);

// Swaps what micro-batches run so that ranks end together. The plan is one without a
// pipeline.
Plan swapSequences(const Problem& problem, Plan plan);

}  // namespace hdpcomm::planner
