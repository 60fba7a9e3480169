// Local search on plans.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Improves a plan of few micro-batches without slices by simulated annealing, if that finds a
// shorter one.
Plan refine(const Problem& problem, Plan plan, double lower_bound);

}  // namespace hdpcomm::planner
