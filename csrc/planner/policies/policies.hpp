// Plans by the name of a policy, and plans with a queue.
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

// A plan with a queue: short sequences that fit one rank are bound to none. Ranks that have run
// what is bound to them take the next micro-batch of the queue, so one that has bad draws, or is
// slow, takes fewer. For plans without a pipeline.
struct QueuedPlan {
  Plan plan;
  // The last micro-batches of the plan, which are in the queue; each names the rank that takes it
  // if all goes as predicted. 0: a queue would make the step longer.
  int queued = 0;
  // A micro-batch is for the ranks that are equal to its own one modulo this number.
  int pools = 1;
};

// `bound`: the plan without a queue.
QueuedPlan planQueue(const Problem& problem, const PolicyOptions& options, Plan bound);

}  // namespace hdpcomm::planner
