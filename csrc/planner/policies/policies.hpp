// Plans by the name of a policy.
#pragma once

#include <string>

#include "planner/baselines/baselines.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The plan of a policy by its name, in which no rank has more ring peers than the cluster allows:
// if it would, of groups of neighbouring ranks. Raises InvalidUsage if these have more, too.
Plan planPolicy(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound);

}  // namespace hdpcomm::planner
