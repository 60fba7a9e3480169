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

namespace {

// By priorities, or by levels where that is shorter and no device holds more than it may. By
// priorities none does where each sequence fits by itself.
SimulatedStep simulateSlices(const Problem& problem, const Plan& plan) {
  SimulatedStep best = simulatePriorities(problem, plan);
  if (problem.cost().cluster().pipeline == 1) return best;
  for (const bool gaps : {false, true}) {
    SimulatedStep step = simulateLevels(problem, plan, gaps);
    if (step.makespan < best.makespan && holds(problem, step)) best = std::move(step);
  }
  return best;
}

// Its makespan, of which one is recorded only where memory may not hold it.
double makespanOfSlices(const Problem& problem, const Plan& plan,
                        const std::vector<PassCosts>& costs) {
  double best = makespanByPriorities(problem, plan);
  if (problem.cost().cluster().pipeline == 1) return best;
  for (const bool gaps : {false, true}) {
    const double makespan = makespanByLevels(problem, plan, costs, best, gaps);
    if (makespan < best && holds(problem, simulateLevels(problem, plan, gaps))) {
      best = makespan;
    }
  }
  return best;
}

bool hasSlices(const Plan& plan) {
  return std::any_of(plan.micro_batches.begin(), plan.micro_batches.end(),
                     [](const MicroBatch& batch) { return batch.slice.some(); });
}

}  // namespace

bool holds(const Problem& problem, const SimulatedStep& step) {
  if (step.peak_tokens.empty()) return true;
  const double most = *std::max_element(step.peak_tokens.begin(), step.peak_tokens.end());
  const auto capacity = static_cast<double>(problem.cost().memory().capacity);
  return most <= capacity * problem.cost().cluster().mostHeld() * (1 + 1e-9);
}

SimulatedStep simulate(const Problem& problem, const Plan& plan) {
  if (problem.cost().cluster().split) return simulateSplit(problem, plan);
  const Cluster& cluster = problem.cost().cluster();
  if (cluster.chunks > 1) return simulatePriorities(problem, plan);
  if (hasSlices(plan)) return simulateSlices(problem, plan);
  SimulatedStep step = simulatePriorities(problem, plan);
  if (cluster.pipeline == 1) return step;
  const double by_levels = makespanByLevels(problem, plan);
  return by_levels < step.makespan ? simulateLevels(problem, plan) : std::move(step);
}

double simulatedMakespan(const Problem& problem, const Plan& plan, double limit) {
  const Cluster& cluster = problem.cost().cluster();
  const bool slices = hasSlices(plan);
  std::vector<PassCosts> costs;
  if (cluster.pipeline > 1 && (slices || limit < std::numeric_limits<double>::infinity())) {
    for (const MicroBatch& batch : plan.micro_batches) costs.push_back(passCosts(problem, batch));
    const double least = leastMakespan(problem, rankTimes(problem, plan, costs));
    if (least >= limit) return least;
  }
  if (cluster.split) return makespanOfSplit(problem, plan, limit);
  if (cluster.chunks > 1) return makespanByPriorities(problem, plan, limit);
  if (slices) return makespanOfSlices(problem, plan, costs);
  if (cluster.pipeline == 1) return makespanByPriorities(problem, plan, limit);
  const double by_levels = makespanByLevels(problem, plan);
  return std::min(by_levels, makespanByPriorities(problem, plan, std::min(by_levels, limit)));
}

}  // namespace hdpcomm::planner
