#include "planner/simulate/simulator.hpp"

#include "planner/model/cost_model.hpp"
#include "planner/simulate/level_order.hpp"
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

}  // namespace hdpcomm::planner
