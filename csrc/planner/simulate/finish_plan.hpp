// What all plans end with: their order, their costs and their makespan.
#pragma once

#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Sorts by start (equal ones stay in place), prices, and finds the makespan, with a pipeline that
// of the simulated schedule.
Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches);

}  // namespace hdpcomm::planner
