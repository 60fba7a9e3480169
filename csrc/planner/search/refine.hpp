// Local search on plans of few micro-batches.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Improves a plan of few micro-batches by local search; never makes it longer. `with_slices`: where
// a pipeline has one stage on each device; else sequences stay whole, and a plan that has slices as
// it is.
Plan refine(const Problem& problem, Plan plan, double lower_bound, bool with_slices = false);

}  // namespace hdpcomm::planner
