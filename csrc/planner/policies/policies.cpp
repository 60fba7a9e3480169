// Policies by name, and plans in which a rank has few ring peers. A plan that keeps the limit
// anyway is taken as it is. Else the policy plans again with groups of neighbouring ranks, whose
// rings give a rank four peers at most; rings then leave each node once only where the limit has
// room for it.
#include "planner/policies/policies.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "planner/pipeline/pipeline.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

using Edge = std::pair<int32_t, int32_t>;

// Calls `use(a, b)` for both ranks of each link of a ring.
template <typename Use>
void forEachEdge(const std::vector<int32_t>& ring, const Use& use) {
  for (size_t i = 0; i < ring.size() && ring.size() > 1; ++i) {
    const int32_t next = ring[i + 1 < ring.size() ? i + 1 : 0];
    use(ring[i], next);
    use(next, ring[i]);
  }
}

// The most ring peers of a rank.
int mostPeers(const Plan& plan, int ranks) {
  std::vector<Edge> edges;
  for (const MicroBatch& batch : plan.micro_batches) {
    forEachEdge(batch.ranks, [&](int32_t a, int32_t b) { edges.emplace_back(a, b); });
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  std::vector<int> peers(ranks, 0);
  for (const Edge& edge : edges) ++peers[edge.first];
  return *std::max_element(peers.begin(), peers.end());
}

// How many rings join each rank with each of its peers.
class Peers {
 public:
  explicit Peers(int ranks) : of_(ranks) {}

  void add(const std::vector<int32_t>& ring) {
    forEachEdge(ring, [&](int32_t a, int32_t b) { ++of_[a][b]; });
  }
  void remove(const std::vector<int32_t>& ring) {
    forEachEdge(ring, [&](int32_t a, int32_t b) {
      const auto known = of_[a].find(b);
      if (--known->second == 0) of_[a].erase(known);
    });
  }
  int most(const std::vector<int32_t>& ranks) const {
    size_t most = 0;
    for (const int32_t rank : ranks) most = std::max(most, of_[rank].size());
    return static_cast<int>(most);
  }

 private:
  std::vector<std::map<int32_t, int>> of_;
};

// Gives groups the rings of `problem`, those that save most rank-seconds first, as long as no rank
// has too many peers.
Plan withBestRings(const Problem& problem, Plan plan) {
  const Cluster& cluster = problem.cost().cluster();
  struct Group {
    std::vector<int32_t> plain, better;  // rings
    std::vector<size_t> batches;
    double saved_s = 0;  // on all of its ranks
  };
  Peers peers(problem.ranks());
  std::map<std::vector<int32_t>, Group> groups;  // by their ranks
  for (size_t i = 0; i < plan.micro_batches.size(); ++i) {
    const MicroBatch& batch = plan.micro_batches[i];
    peers.add(batch.ranks);
    MicroBatch better = batch;
    std::sort(better.ranks.begin(), better.ranks.end());
    Group& group = groups[better.ranks];
    better.ranks = ringOrder(std::move(better.ranks), cluster);
    price(problem, better);
    const auto size = static_cast<double>(batch.ranks.size());
    group.saved_s += (batch.predicted_s - better.predicted_s) * size;
    group.batches.push_back(i);
    group.plain = batch.ranks;
    group.better = std::move(better.ranks);
  }
  std::vector<const Group*> changes;
  for (const auto& [ranks, group] : groups) {
    if (group.saved_s > 0) changes.push_back(&group);
  }
  if (changes.empty()) return plan;
  std::stable_sort(changes.begin(), changes.end(),
                   [](const Group* a, const Group* b) { return a->saved_s > b->saved_s; });
  std::vector<MicroBatch> batches = plan.micro_batches;
  for (const Group* group : changes) {
    for (size_t i = 0; i < group->batches.size(); ++i) peers.remove(group->plain);
    peers.add(group->better);
    if (peers.most(group->better) <= cluster.ring_peers) {
      for (const size_t batch : group->batches) batches[batch].ranks = group->better;
    } else {
      peers.remove(group->better);
      for (size_t i = 0; i < group->batches.size(); ++i) peers.add(group->plain);
    }
  }
  Plan better = finishPlan(problem, std::move(batches));
  if (better.makespan >= plan.makespan) return plan;
  better.made_by = std::move(plan.made_by);
  return better;
}

bool isBalanced(const std::string& policy) { return policy == "balanced" || policy == "pipeline"; }

Plan planFreely(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound) {
  const auto named = [&](Plan plan) {
    plan.made_by = policy;
    return plan;
  };
  if (policy == "static") return named(planStatic(problem, options));
  if (policy == "naive") return named(planNaive(problem));
  if (policy == "pow2") return named(planPow2(problem));
  if (isBalanced(policy)) {
    const auto plan = problem.cost().cluster().pipeline > 1 ? planPipeline : planBalanced;
    return plan(problem, options, lower_bound);
  }
  throwInvalidUsage("policy is '" + policy +
                    "', expected static, naive, balanced, pipeline or pow2");
}

}  // namespace

Plan planPolicy(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound) {
  Plan plan = planFreely(problem, policy, options, lower_bound);
  const int limit = problem.cost().cluster().ring_peers;
  if (limit == 0 || mostPeers(plan, problem.ranks()) <= limit) return plan;
  std::optional<Plan> best;
  Cluster neighbours = problem.cost().cluster();
  neighbours.neighbours = true;
  plan = planFreely(problem.onCluster(neighbours), policy, options, lower_bound);
  const int fewest = mostPeers(plan, problem.ranks());
  if (fewest <= limit) best = withBestRings(problem, std::move(plan));
  if (isBalanced(policy)) {
    for (const char* other : {"naive", "pow2", "static"}) {
      try {
        Plan found = planPolicy(problem, other, options, lower_bound);
        if (!best || found.makespan < best->makespan) best = std::move(found);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kInvalidUsage) throw;  // else it has no such plan
      }
    }
  }
  if (best) return std::move(*best);
  throwInvalidUsage("ranks have " + std::to_string(fewest) + " ring peers in the plan of policy " +
                    policy + " for this step, and ring_peers is " + std::to_string(limit) +
                    ": give at least " + std::to_string(fewest) +
                    ", or the policy static, whose ranks have 2");
}

}  // namespace hdpcomm::planner
