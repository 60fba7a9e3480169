// Local search on plans of few micro-batches.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Improves a plan of few micro-batches without slices by local search; never makes it longer.
Plan refine(const Problem& problem, Plan plan, double lower_bound);

}  // namespace hdpcomm::planner
