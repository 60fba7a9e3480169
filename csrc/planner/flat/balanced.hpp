// The policy "balanced" for ranks that are one device each.
#pragma once

#include "planner/baselines/baselines.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The best of all candidates; never longer than a plan of another policy.
Plan planBalanced(const Problem& problem, const PolicyOptions& options, double lower_bound);

}  // namespace hdpcomm::planner
