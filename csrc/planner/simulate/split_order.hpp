// Pipelines with split backward passes (Qi et al., arXiv 2401.10241): a backward pass gives the
// gradients of its inputs, which the stage before waits for; those of the weights come later, where
// the device would wait. Forward and backward passes keep an order of 1F1B. A device owes gradients
// to no more micro-batches at a time than the first device of a pipeline does under 1F1B, so the
// most that any device holds does not grow (the paper's ZB-H1).
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/simulated_step.hpp"

namespace hdpcomm::planner {

// The shortest of a few such orders; never longer than 1F1B with whole backward passes.
SimulatedStep simulateSplit(const Problem& problem, const Plan& plan);

// Its makespan alone; `limit` where it is certain not to be below that.
double makespanOfSplit(const Problem& problem, const Plan& plan, double limit);

}  // namespace hdpcomm::planner
