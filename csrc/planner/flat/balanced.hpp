// The policy "balanced": the best of all candidates; never longer than a plan of another policy.
#pragma once

#include "planner/baselines/baselines.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// For ranks that are one device each.
Plan planBalanced(const Problem& problem, const PolicyOptions& options, double lower_bound);
// For ranks that are pipelines.
Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound);

}  // namespace hdpcomm::planner
