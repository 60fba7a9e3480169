#include "planner/simulate/finish_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// Each micro-batch starts when the last of its ranks is free.
class InOrder {
 public:
  explicit InOrder(int ranks) : ready_(ranks, 0.0) {}

  void run(const MicroBatch& batch) {
    double start = 0;
    for (const int32_t rank : batch.ranks) start = std::max(start, ready_[rank]);
    const double end = start + batch.predicted_s;
    for (const int32_t rank : batch.ranks) ready_[rank] = end;
    makespan_ = std::max(makespan_, end);
  }

  double makespan() const noexcept { return makespan_; }

 private:
  std::vector<double> ready_;
  double makespan_ = 0;
};

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
    const double simulated = cluster.sharesLinks() ? simulatedMakespan(problem, plan) : 0;
    // No shorter than in order but for rounding: longer where rings share links.
    if (simulated > plan.makespan * (1 + 1e-9)) plan.makespan = simulated;
  }
  const double area = plan.makespan * problem.ranks();
  plan.idle_share = area > 0 ? std::max(0.0, 1 - busy / area) : 0;
  return plan;
}

Plan finishWithRings(const Problem& problem, std::vector<MicroBatch> batches, double limit) {
  const CostModel& cost = problem.cost();
  const Cluster& cluster = cost.cluster();
  if (cluster.pipeline == 1 && limit < std::numeric_limits<double>::infinity()) {
    InOrder flat(problem.ranks());
    for (MicroBatch& batch : batches) {  // as if no rings shared links
      const Scope scope = cluster.scope(batch.ranks.front(), batch.ranks.back());
      batch.predicted_s =
          cost.seconds(workOf(problem, batch).load, static_cast<int>(batch.ranks.size()), scope) /
          slowest(batch.ranks, cluster);
      flat.run(batch);
      if (flat.makespan() < limit) continue;
      Plan late;
      late.makespan = flat.makespan();
      return late;
    }
  }
  for (MicroBatch& batch : batches) batch.ranks = ringOrder(std::move(batch.ranks), cluster);
  return finishPlan(problem, std::move(batches), limit);
}

}  // namespace hdpcomm::planner
