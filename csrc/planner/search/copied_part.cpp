#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "planner/bound/bound.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/slice_bounds.hpp"
#include "planner/search/search.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kNear = 0.004;  // to the bound, where no other part is tried

// How many equal parts of whole nodes and domains; where speeds fall from rank to rank, of any.
int numParts(const Problem& problem, int ranks_of_part) {
  const Cluster& cluster = problem.cost().cluster();
  const auto& speeds = cluster.speeds;
  if (problem.hasRiders() || !std::is_sorted(speeds.begin(), speeds.end(), std::greater<>())) {
    return 1;
  }
  const int whole = speeds.empty() ? std::max(cluster.ranks_per_node, cluster.ranks_per_domain) : 1;
  int parts = 1;
  while (cluster.ranks % (2 * parts * whole) == 0 && cluster.ranks / (2 * parts) >= ranks_of_part) {
    parts *= 2;
  }
  return parts;
}

// The rank of all that is this one of a part. Where speeds fall, a part has one of each few ranks
// that follow each other.
int32_t rankOf(const Cluster& cluster, int32_t rank, int part, int parts) {
  return cluster.speeds.empty() ? rank + part * (cluster.ranks / parts) : rank * parts + part;
}

// The first part, with the least speeds of all parts: each sequence whose place in `order` is a
// multiple of the number of parts. None where these do not fit.
std::optional<Problem> firstPart(const Problem& problem, int parts) {
  const std::vector<int32_t>& order = problem.byLength();
  Cluster cluster = problem.cost().cluster();
  cluster.ranks /= parts;
  if (!cluster.speeds.empty()) {
    for (int rank = 0; rank < cluster.ranks; ++rank) {
      cluster.speeds[rank] = problem.cost().cluster().speed(rank * parts + parts - 1);
    }
    cluster.speeds.resize(cluster.ranks);
  }
  std::vector<int32_t> sequences;
  for (size_t i = 0; i < order.size(); i += parts) {
    if (problem.minRanks(order[i]) > cluster.ranks) return {};
    sequences.push_back(order[i]);
  }
  return problem.part(sequences,
                      CostModel(problem.cost().params(), problem.cost().memory(), cluster));
}

// The same slice of a sequence that is about as long, no longer, or the rest of it.
Slice copyOf(const Problem& problem, int32_t sequence, const Slice& slice) {
  const int64_t length = problem.lengths()[sequence];
  if (slice.first == 0 && slice.end >= length) return {};
  const int64_t end = std::min(slice.end, length);
  return {slice.first, end, slice.more && end < length,
          problem.squares(sequence, slice.first, end)};
}

}  // namespace

std::optional<Plan> copiesOf(const Problem& problem, int parts, const Plan& first) {
  const std::vector<int32_t>& order = problem.byLength();
  std::vector<MicroBatch> batches;
  batches.reserve(first.micro_batches.size() * parts);
  for (int copy = 0; copy < parts; ++copy) {
    for (const MicroBatch& batch : first.micro_batches) {
      const auto size = static_cast<int>(batch.ranks.size());
      MicroBatch own;
      Load load;
      own.sequences.reserve(batch.sequences.size());
      for (const int32_t place : batch.sequences) {
        const size_t at = static_cast<size_t>(place) * parts + copy;
        if (at >= order.size() || problem.lengths()[order[at]] <= batch.slice.first) continue;
        own.sequences.push_back(order[at]);
        load += problem.own(order[at]);
      }
      if (own.sequences.empty()) continue;
      // A shorter sequence hides fewer copies to host memory.
      if (batch.offload > 0 && !fits(problem, load, own.sequences, size)) return {};
      if (batch.slice.some()) {
        if (!sliceable(problem, own.sequences.front())) return {};
        own.slice = copyOf(problem, own.sequences.front(), batch.slice);
      }
      own.ranks = batch.ranks;
      for (int32_t& rank : own.ranks) rank = rankOf(problem.cost().cluster(), rank, copy, parts);
      own.start = static_cast<double>(batches.size());
      batches.push_back(std::move(own));
    }
  }
  Plan plan = finishPlan(problem, std::move(batches));
  plan.made_by = first.made_by + " + copies";
  return plan;
}

std::optional<Problem> sampleOf(const Problem& problem, int ranks) {
  const int parts = numParts(problem, ranks);
  if (parts == 1) return {};
  return firstPart(problem, parts);
}

std::optional<Plan> planCopiedPart(const Problem& problem, double bound, double fair,
                                   std::span<const int> ranks_of_parts,
                                   const std::function<Plan(const Problem&, double)>& plan_part) {
  int parts = 1;
  Plan best;
  for (const int ranks : ranks_of_parts) {
    const int tried = numParts(problem, ranks);
    if (tried == parts) continue;
    const std::optional<Problem> part = firstPart(problem, tried);
    if (!part) continue;
    const double part_bound = lowerBound(*part);
    if (part_bound > bound * (1 + fair)) continue;
    Plan plan = plan_part(*part, part_bound);
    if (parts > 1 && plan.makespan >= best.makespan) continue;
    best = std::move(plan);
    parts = tried;
    if (best.makespan <= bound * (1 + kNear)) break;
  }
  if (parts == 1) return {};
  return copiesOf(problem, parts, best);
}

}  // namespace hdpcomm::planner
