#include "planner/simulate/pass_costs.hpp"

#include <cstdint>

#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"

namespace hdpcomm::planner {
namespace {

// The ranks of a micro-batch.
struct Group {
  int size;
  Scope scope;
  double messages;  // of its ring, for one that a link has room for
  double speed;     // of the slowest rank
};

PassCosts costsOn(const CostModel& cost, const Group& group, const Work& work, double offload) {
  const CostParams& params = cost.params();
  const int chunks = cost.cluster().chunks;
  const auto& [size, scope, messages, speed] = group;
  const auto& [load, held, kept_tokens] = work;
  const auto kept = static_cast<double>(kept_tokens);
  const double step = cost.stepCompute(load, size);
  const double transfer = cost.stepTransfer(load, size, scope, messages, kept);
  const double rest =
      params.linear * load.tokens / size + params.fixed + (size - 1) * params.ring_step;
  const auto pass = [&](double share, double sent, double step_wait, double load_kept) {
    const double wait = (size - 1) * step_wait;
    const double parts = chunks * speed;
    PassCosts::Pass result;
    result.seconds = std::max(share * (size * step + rest) + wait, load_kept) / parts;
    result.exposed = wait / parts;
    result.compute = share * step / parts;
    result.bytes = sent * cost.kv(scope) * (load.tokens + kept) / size / parts;
    result.latency = sent * cost.latency(scope) / parts;
    result.steps = size - 1;
    return result;
  };
  PassCosts result;
  result.forward = pass(params.forward, params.forward_transfer, cost.forwardWait(step, transfer),
                        cost.forwardLoad(kept, size, offload));
  result.backward = pass(1 - params.forward, 1 - params.forward_transfer,
                         cost.backwardWait(step, transfer), cost.backwardLoad(kept, size, offload));
  if (cost.cluster().split) {
    const double most = std::max(0.0, result.backward.seconds - result.backward.exposed);
    result.weights = std::min(most, params.put_off * load.tokens / size / (chunks * speed));
  }
  const double tokens = static_cast<double>(held);
  result.copy = offload * cost.memory().copy * tokens / chunks;
  result.resident = tokens * (1 - offload * cost.memory().offloadable) / chunks;
  return result;
}

}  // namespace

PassCosts passCosts(const Problem& problem, const MicroBatch& batch, const Work& work, int kind) {
  const CostModel& cost = problem.cost().ofKind(kind);
  const Cluster& cluster = cost.cluster();
  const Group group{static_cast<int>(batch.ranks.size()), scopeOf(batch.ranks, cluster),
                    crowding(batch.ranks, cluster), slowest(batch.ranks, cluster)};
  PassCosts result = costsOn(cost, group, work, batch.offload);
  if (batch.slice.some() && cluster.pipeline == 1) {
    if (batch.slice.more) {
      result.backward.seconds += result.forward.seconds;
      result.backward.exposed += result.forward.exposed;
      result.resident = 0;  // of the first forward pass
    } else {                // with the last slice all slices' keys are there
      const MemoryParams& memory = cost.memory();
      const double share = memory.kept + batch.offload * (memory.kept_offloaded - memory.kept);
      const auto kept = static_cast<double>(batch.slice.end);
      result.resident += share * kept / group.size;
    }
  }
  return result;
}

PassCosts passCostsOfOne(const CostModel& cost, const Load& load, double speed) {
  const Work work{load, static_cast<int64_t>(load.tokens), 0};
  return costsOn(cost, {1, Scope::kNode, 1, speed}, work, cost.offloadFor(load.tokens));
}

PlanCosts::PlanCosts(const Problem& problem, const Plan& plan)
    : kinds_(problem.cost().kinds()), kind_of_(problem.cost().kindOf()) {
  all_.reserve(plan.micro_batches.size() * kinds_);
  for (const MicroBatch& batch : plan.micro_batches) {
    const Work work = workOf(problem, batch);
    for (size_t kind = 0; kind < kinds_; ++kind) {
      all_.push_back(passCosts(problem, batch, work, static_cast<int>(kind)));
    }
  }
}

RankTimes::RankTimes(const Problem& problem)
    : cost_(problem.cost()),
      cluster_(cost_.cluster()),
      kinds_(cost_.kinds()),
      times_(problem.ranks() * kinds_) {}

RankTimes::RankTimes(const Problem& problem, const Plan& plan, const PlanCosts& costs)
    : RankTimes(problem) {
  for (size_t i = 0; i < plan.micro_batches.size(); ++i) {
    for (const int32_t rank : plan.micro_batches[i].ranks) {
      int kind = 0;
      for (const PassCosts& each : costs.onKinds(i)) {
        add(rank, kind++, each.forward.seconds, each.backward.seconds);
      }
    }
  }
}

double RankTimes::busy(int32_t rank, int device) const {
  double sum = 0;
  for (int chunk = 0; chunk < cluster_.chunks; ++chunk) {
    sum += of(rank, chunk * cluster_.pipeline + device).busy;
  }
  return sum;
}

double RankTimes::wayBack(int32_t rank, int device) const {
  double sum = 0;
  for (int stage = 0; stage < device; ++stage) sum += of(rank, stage).backward;
  return sum;
}

double RankTimes::leastMakespan() const {
  constexpr double kRounding = 1e-9;  // of sums
  double least = 0;
  for (int32_t rank = 0; rank < cluster_.ranks; ++rank) {
    if (busy(rank, 0) == 0) continue;
    double ways = 0;
    for (int device = 0; device < cluster_.pipeline; ++device) {
      least = std::max(least, (busy(rank, device) + ways) * (1 - kRounding));
      ways += of(rank, device).forward + of(rank, device).backward;
    }
  }
  return least;
}

}  // namespace hdpcomm::planner
