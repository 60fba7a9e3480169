// 1F1B by levels: the level of a micro-batch is one above the highest of those that its ranks run
// before it. Every device runs the passes of its levels in the order in which a pipeline of that
// many equal micro-batches does, and leaves out those that it has none of. That order of all levels
// has no circle, so neither have parts of it.
#pragma once

#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/pass_costs.hpp"
#include "planner/simulate/simulated_step.hpp"

namespace hdpcomm::planner {

// Runs a plan by levels; for pipelines with one stage on each device. Backward passes give the
// gradients of weights, too, unless these are left out. `gaps`: n slices take n - 1 levels more, so
// that the micro-batches behind them begin when as many are in flight as without slices. It makes
// no difference to a plan without any.
SimulatedStep simulateLevels(const Problem& problem, const Plan& plan, bool with_weights = true,
                             bool gaps = false);

// Its makespan alone, which is found faster; one that is not below `limit` where that is certain.
double makespanByLevels(const Problem& problem, const Plan& plan);
// `costs`: of its micro-batches.
double makespanByLevels(const Problem& problem, const Plan& plan, std::vector<PassCosts> costs,
                        double limit, bool gaps = false);

}  // namespace hdpcomm::planner
