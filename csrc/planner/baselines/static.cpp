// The baseline: a fixed DP x CP mesh. Sequences are packed up to what a context-parallel group
// holds, every pack is cut over its whole group, and the groups get the same number of packs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// The smallest group size that divides `ranks` and holds `context` tokens; `ranks` if none does.
int smallestGroup(int ranks, int64_t capacity, int64_t context) {
  for (int size = 1; size < ranks; ++size) {
    if (ranks % size == 0 && size * capacity >= context) return size;
  }
  return ranks;
}

struct Mesh {
  int size = 0;
  int64_t longest = 1;
  int which = 0;  // the longest sequence
};

Mesh meshOf(const Problem& problem, const PolicyOptions& options) {
  Mesh mesh;
  for (int i = 0; i < problem.count(); ++i) {
    if (problem.lengths()[i] > mesh.longest) {
      mesh.longest = problem.lengths()[i];
      mesh.which = i;
    }
  }
  const int64_t context = std::max(mesh.longest, options.context);
  mesh.size = options.context_ranks > 0
                  ? options.context_ranks
                  : smallestGroup(problem.ranks(), problem.cost().memory().capacity, context);
  return mesh;
}

int groupSize(const Problem& problem, const PolicyOptions& options) {
  const int ranks = problem.ranks();
  const int64_t capacity = problem.cost().memory().capacity;
  const auto [size, longest, which] = meshOf(problem, options);
  if (ranks % size != 0) {
    throwInvalidUsage("context_ranks is " + std::to_string(size) + ", which does not divide the " +
                      std::to_string(ranks) + " ranks: give a divisor");
  }
  if (size * capacity < longest) {
    throwInvalidUsage("sequence " + std::to_string(which) + " of " + std::to_string(longest) +
                      " tokens is longer than the " + std::to_string(size * capacity) +
                      " tokens that a static group of " + std::to_string(size) +
                      " ranks holds without offload: raise capacity to at least " +
                      std::to_string((longest + size - 1) / size) + ", or context_ranks or ranks");
  }
  return size;
}

}  // namespace

double leastStatic(const Problem& problem, const PolicyOptions& options) {
  const CostModel& cost = problem.cost();
  const CostParams& params = cost.params();
  const auto [size, longest, which] = meshOf(problem, options);
  if (problem.ranks() % size != 0 || size * cost.memory().capacity < longest) {
    return std::numeric_limits<double>::infinity();  // there is no such plan
  }
  Load all;
  double shards = 0;
  for (int i = 0; i < problem.count(); ++i) {
    all += problem.own(i);
    shards += static_cast<double>((problem.lengths()[i] + size - 1) / size);
  }
  const double packs = std::ceil(shards / static_cast<double>(cost.memory().capacity));
  const double compute = cost.stepCompute(all, size);  // of one ring step of each pack
  double work = size * compute + params.linear * all.tokens / size + packs * params.fixed;
  if (size > 1) {
    // The waits of all packs are at least those of the sums.
    const Scope scope = cost.cluster().leastScope(size);
    const double transfer = cost.stepTransfer(all, size, scope) + (packs - 1) * cost.latency(scope);
    work += (size - 1) * (cost.forwardWait(compute, transfer) +
                          cost.backwardWait(compute, transfer) + packs * params.ring_step);
  }
  return work * size / problem.ranks();
}

Plan planStatic(const Problem& problem, const PolicyOptions& options, double limit) {
  const int size = groupSize(problem, options);
  const int groups = problem.ranks() / size;
  const int64_t capacity = problem.cost().memory().capacity;
  // Packed by the tokens that a rank holds of each sequence: ceil(length / size).
  std::vector<int64_t> shards;
  for (const int64_t length : problem.lengths()) shards.push_back((length + size - 1) / size);
  auto packs = packBestFit(shards, problem.byLength(), capacity);
  LimitCheck check(problem, limit);
  std::vector<MicroBatch> batches;
  batches.reserve(packs.size());
  for (size_t i = 0; i < packs.size(); ++i) {
    MicroBatch batch;
    batch.ranks.resize(size);
    std::iota(batch.ranks.begin(), batch.ranks.end(), static_cast<int>(i % groups) * size);
    batch.sequences = std::move(packs[i]);
    if (check.late(batch)) return check.latePlan();
    batches.push_back(std::move(batch));
  }
  return finishWithRings(problem, std::move(batches), limit);
}

}  // namespace hdpcomm::planner
