// Swaps of sequences between micro-batches.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Swaps what micro-batches run so that ranks end together; never makes the plan longer. The
// plan is one without a pipeline.
Plan swapSequences(const Problem& problem, Plan plan);

}  // namespace hdpcomm::planner
