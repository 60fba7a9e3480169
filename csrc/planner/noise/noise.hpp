// Micro-batches that take longer or shorter than predicted, by chance: a step ends with the rank
// that had most bad draws, so the mean over many possible steps counts, not the makespan. For plans
// without a pipeline.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Mean makespan: the compute of each micro-batch takes a random factor with mean 1 and the cost
// model's `noise` as deviation; its waiting for messages does not vary.
double expectedMakespan(const Problem& problem, const Plan& plan);

// Gives ranks whose end is less certain less of the short sequences, and runs these in more,
// smaller micro-batches, where the mean makespan falls by that. The plan itself where there is no
// noise.
Plan planForNoise(const Problem& problem, Plan plan);

}  // namespace hdpcomm::planner
