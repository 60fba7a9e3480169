#include "planner/simulate/finish_plan.hpp"

#include <algorithm>
#include <cstdint>

#include "planner/model/cost_model.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// Each micro-batch starts when the last of its ranks is free.
double runInOrder(const Problem& problem, const std::vector<MicroBatch>& batches) {
  std::vector<double> ready(problem.ranks(), 0.0);
  double makespan = 0;
  for (const MicroBatch& batch : batches) {
    double start = 0;
    for (const int32_t rank : batch.ranks) start = std::max(start, ready[rank]);
    const double end = start + batch.predicted_s;
    for (const int32_t rank : batch.ranks) ready[rank] = end;
    makespan = std::max(makespan, end);
  }
  return makespan;
}

}  // namespace

Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches, double limit) {
  Plan plan;
  plan.micro_batches = std::move(batches);
  const auto earlier = [](const MicroBatch& a, const MicroBatch& b) { return a.start < b.start; };
  if (!std::is_sorted(plan.micro_batches.begin(), plan.micro_batches.end(), earlier)) {
    std::stable_sort(plan.micro_batches.begin(), plan.micro_batches.end(), earlier);
  }
  double busy = 0;
  for (MicroBatch& batch : plan.micro_batches) {
    price(problem, batch);
    busy += batch.predicted_s * static_cast<double>(batch.ranks.size());
  }
  const Cluster& cluster = problem.cost().cluster();
  if (cluster.pipeline > 1) {
    plan.makespan = simulatedMakespan(problem, plan, limit);
  } else {
    plan.makespan = runInOrder(problem, plan.micro_batches);
    const double simulated = cluster.sharesLinks() ? simulatedMakespan(problem, plan) : 0;
    // No shorter than in order but for rounding: longer where rings share links.
    if (simulated > plan.makespan * (1 + 1e-9)) plan.makespan = simulated;
  }
  const double area = plan.makespan * problem.ranks();
  plan.idle_share = area > 0 ? std::max(0.0, 1 - busy / area) : 0;
  return plan;
}

}  // namespace hdpcomm::planner
