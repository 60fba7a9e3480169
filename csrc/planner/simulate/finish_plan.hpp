// What all plans end with: their order, their costs and their makespan.
#pragma once

#include <limits>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Sorts by start (equal ones stay in place), prices, and finds the makespan, with a pipeline that
// of the simulated schedule. Where a plan is certain not to end before `limit`, its makespan is one
// that it does not beat, and not below the limit.
Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches,
                double limit = std::numeric_limits<double>::infinity());

// The same for micro-batches that have no start, in their order, and whose ranks are sorted: it
// puts them into ring order.
Plan finishWithRings(const Problem& problem, std::vector<MicroBatch> batches, double limit);

}  // namespace hdpcomm::planner
