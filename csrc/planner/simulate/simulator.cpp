#include "planner/simulate/simulator.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/simulate/level_order.hpp"
#include "planner/simulate/pass_costs.hpp"
#include "planner/simulate/priority_order.hpp"
#include "planner/simulate/split_order.hpp"

namespace hdpcomm::planner {

SimulatedStep simulate(const Problem& problem, const Plan& plan) {
  if (problem.cost().cluster().split) return simulateSplit(problem, plan);
  SimulatedStep step = simulatePriorities(problem, plan);
  const Cluster& cluster = problem.cost().cluster();
  if (cluster.pipeline == 1 || cluster.chunks > 1) return step;
  const double by_levels = makespanByLevels(problem, plan);
  return by_levels < step.makespan ? simulateLevels(problem, plan) : std::move(step);
}

double simulatedMakespan(const Problem& problem, const Plan& plan, double limit) {
  const Cluster& cluster = problem.cost().cluster();
  if (cluster.pipeline > 1 && limit < std::numeric_limits<double>::infinity()) {
    std::vector<PassCosts> costs;
    for (const MicroBatch& batch : plan.micro_batches) costs.push_back(passCosts(problem, batch));
    const double least = leastMakespan(problem, rankTimes(problem, plan, costs));
    if (least >= limit) return least;
  }
  if (cluster.split) return simulateSplit(problem, plan).makespan;
  if (cluster.pipeline == 1 || cluster.chunks > 1) {
    return makespanByPriorities(problem, plan, limit);
  }
  const double by_levels = makespanByLevels(problem, plan);
  return std::min(by_levels, makespanByPriorities(problem, plan, std::min(by_levels, limit)));
}

}  // namespace hdpcomm::planner
