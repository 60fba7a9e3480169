// Policies by name, and plans in which a rank has few ring peers. A plan that keeps the limit
// anyway is taken as it is. Else the policy plans again with groups of neighbouring ranks, whose
// rings give a rank four peers at most.
#include "planner/policies/policies.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/pipeline/pipeline.hpp"

namespace hdpcomm::planner {
namespace {

using Edge = std::pair<int32_t, int32_t>;

// The most ring peers of a rank.
int mostPeers(const Plan& plan, int ranks) {
  std::vector<Edge> edges;
  for (const MicroBatch& batch : plan.micro_batches) {
    const std::vector<int32_t>& ring = batch.ranks;
    for (size_t i = 0; i < ring.size() && ring.size() > 1; ++i) {
      const int32_t next = ring[i + 1 < ring.size() ? i + 1 : 0];
      edges.emplace_back(ring[i], next);
      edges.emplace_back(next, ring[i]);
    }
  }
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  std::vector<int> peers(ranks, 0);
  for (const Edge& edge : edges) ++peers[edge.first];
  return *std::max_element(peers.begin(), peers.end());
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
  if (fewest <= limit) best = std::move(plan);
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
