#include "planner/simulate/finish_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// Equal ones stay in place.
std::vector<MicroBatch> sortedByStart(std::vector<MicroBatch> batches) {
  const auto earlier = [](const MicroBatch& a, const MicroBatch& b) { return a.start < b.start; };
  if (std::is_sorted(batches.begin(), batches.end(), earlier)) return batches;
  std::vector<std::pair<double, size_t>> order;
  order.reserve(batches.size());
  for (size_t i = 0; i < batches.size(); ++i) order.emplace_back(batches[i].start, i);
  std::sort(order.begin(), order.end());
  std::vector<MicroBatch> sorted;
  sorted.reserve(batches.size());
  for (const auto& [unused, place] : order) sorted.push_back(std::move(batches[place]));
  return sorted;
}

}  // namespace

Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches, double limit) {
  Plan plan;
  plan.micro_batches = sortedByStart(std::move(batches));
  const Cluster& cluster = problem.cost().cluster();
  double busy = 0;
  InOrder flat(problem.ranks());
  for (MicroBatch& batch : plan.micro_batches) {
    price(problem, batch);
    busy += batch.predicted_s * static_cast<double>(batch.ranks.size());
    if (cluster.pipeline > 1) continue;
    flat.run(batch);
    if (flat.makespan() >= limit) break;
  }
  if (cluster.pipeline > 1) {
    plan.makespan = simulatedMakespan(problem, plan, limit);
  } else {
    plan.makespan = flat.makespan();
    const double simulated = cluster.sharesInterfaces() ? simulatedMakespan(problem, plan) : 0;
    // No shorter than in order but for rounding: longer where rings share links.
    if (simulated > plan.makespan * (1 + 1e-9)) plan.makespan = simulated;
  }
  const double area = plan.makespan * problem.ranks();
  plan.idle_share = area > 0 ? std::max(0.0, 1 - busy / area) : 0;
  return plan;
}

Plan finishWithRings(const Problem& problem, std::vector<MicroBatch> batches, double limit) {
  const Cluster& cluster = problem.cost().cluster();
  for (MicroBatch& batch : batches) batch.ranks = ringOrder(std::move(batch.ranks), cluster);
  return finishPlan(problem, std::move(batches), limit);
}

void InOrder::run(const MicroBatch& batch) {
  double start = 0;
  for (const int32_t rank : batch.ranks) start = std::max(start, ready_[rank]);
  const double end = start + batch.predicted_s;
  for (const int32_t rank : batch.ranks) ready_[rank] = end;
  makespan_ = std::max(makespan_, end);
}

LimitCheck::LimitCheck(const Problem& problem, double limit)
    : problem_(problem),
      limit_(problem.cost().cluster().pipeline == 1 ? limit
                                                    : std::numeric_limits<double>::infinity()),
      flat_(problem.ranks()) {}

bool LimitCheck::late(MicroBatch& batch) {
  if (limit_ == std::numeric_limits<double>::infinity()) return false;
  const CostModel& cost = problem_.cost();
  // As if no rings shared links.
  const Scope scope = cost.cluster().scope(batch.ranks.front(), batch.ranks.back());
  batch.predicted_s =
      cost.seconds(workOf(problem_, batch).load, static_cast<int>(batch.ranks.size()), scope) /
      slowest(batch.ranks, cost.cluster());
  flat_.run(batch);
  return flat_.makespan() >= limit_;
}

Plan LimitCheck::latePlan() const {
  Plan late;
  late.makespan = flat_.makespan();
  return late;
}

}  // namespace hdpcomm::planner
