// The policy "balanced": an extension of ByteScale's DP-Balance. A block is a run
// of neighbouring ranks that become free at the same time. Sequences are placed longest first; each
// takes part of one block, with the fewest ranks on which it ends before a target time, so that no
// rank waits for another. Short sequences come last, each onto the least loaded rank. Several
// targets near the lower bound are tried, and the shortest plan is kept.
#include "planner/flat/balanced.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "planner/flat/block_packer.hpp"
#include "planner/flat/packing.hpp"
#include "planner/flat/waves.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/rings.hpp"
#include "planner/search/candidates.hpp"
#include "planner/search/copied_part.hpp"
#include "planner/search/local_search.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// Makespan / lower bound below which a round of further targets is skipped, by round.
constexpr double kGoodEnough[] = {1.002, 1.008};
constexpr double kGoodGap = 0.004;        // below this, local search is not worth its time
constexpr double kRefineLimit = 1 << 15;  // sequences x ranks, for local search
// Ranks from which on a cluster is planned in parts, and those of a part at least. With half as
// many ranks plans of the whole are about as short; with parts of this size the packer looks at all
// blocks, and which of both is better varies.
constexpr int kLarge = 1 << 16;
constexpr int kRanksOfParts[] = {1 << 13, 1 << 14};
constexpr int kSpeedClasses = 256;  // of a large cluster, whose ranks would all be blocks
// How far a part's bound may lie above that of all. It does by 0.0003 at most for lengths without a
// long tail, and by 0.009 for those of byted, whose longest ones are few.
constexpr double kFair = 0.001;

// Searches for the target time that gives the shortest plan: first the lower bound, then times
// between it and the best makespan so far.
Plan planBlocks(const Problem& problem, double lower_bound) {
  std::vector<Job> jobs = makeJobs(problem);
  if (jobs.empty()) return finishPlan(problem, {});
  BlockPacker packer(problem, jobs);
  double best = std::numeric_limits<double>::infinity();
  Packing packing;
  std::vector<double> tried;  // once more they would give nothing better
  const auto attempt = [&](double target) {
    if (std::find(tried.begin(), tried.end(), target) != tried.end()) return;
    tried.push_back(target);
    const double makespan = packer.run(target, best);
    if (makespan >= best) return;
    best = makespan;
    packer.take(packing);
  };
  attempt(lower_bound * (1 + 1e-6));
  for (const double good_enough : kGoodEnough) {
    if (best <= lower_bound * good_enough) break;
    const double span = best - lower_bound;
    for (const double share : {0.1, 0.25, 0.45, 0.7}) {
      const double target = lower_bound + share * span;
      if (target >= best) break;
      attempt(target);
    }
  }
  return finishPlan(problem, collectPlaced(problem, jobs, packing));
}

// For ranks of different speeds: plans as if they lay beside each other by falling speed, so that
// those of one speed are one block, in large clusters those of about one speed, at that of the
// slowest. Groups may then cross nodes more often, which is priced.
Plan planBySpeed(const Problem& problem, double lower_bound) {
  std::vector<int32_t> ranks(problem.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  const Cluster& cluster = problem.cost().cluster();
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return cluster.speed(a) > cluster.speed(b); });
  const auto sorted = [&](int of_class) {
    Cluster by_speed = cluster;
    for (int place = 0; place < problem.ranks(); ++place) {
      const int last = std::min(problem.ranks(), (place / of_class + 1) * of_class) - 1;
      by_speed.speeds[place] = cluster.speed(ranks[last]);
    }
    return problem.onCluster(by_speed);
  };
  const auto planned = [](const Problem& part, double bound) {
    Plan plan = planBlocks(part, bound);
    if (plan.makespan > bound * (1 + kGoodGap)) {
      if (auto waves = planWaves(part, bound, plan.makespan)) plan = std::move(*waves);
    }
    return plan;
  };
  const bool large = problem.ranks() > kLarge;
  std::optional<Plan> copies;
  if (large) {
    copies =
        planCopiedPart(sorted(1), lower_bound, kFair, std::span(kRanksOfParts).last(1), planned);
  }
  Plan plan = copies ? std::move(*copies)
                     : planned(sorted(large ? problem.ranks() / kSpeedClasses : 1), lower_bound);
  for (MicroBatch& batch : plan.micro_batches) {
    for (int32_t& rank : batch.ranks) rank = ranks[rank];
    std::sort(batch.ranks.begin(), batch.ranks.end());
    batch.ranks = ringOrder(std::move(batch.ranks), cluster);
  }
  return finishPlan(problem, std::move(plan.micro_batches));
}

// Every pack runs on all ranks: no idle time, but the most transfers.
Plan planUniform(const Problem& problem) {
  PolicyOptions options;
  options.context_ranks = problem.ranks();
  const int64_t longest = *std::max_element(problem.lengths().begin(), problem.lengths().end());
  if (longest > problem.cost().memory().capacity * problem.ranks()) return planNaive(problem);
  return planStatic(problem, options);
}

constexpr Candidate<PlanSearch> kBlockCandidates[] = {
    {"copies",
     [](const PlanSearch& search) {
       return search.problem.ranks() >= kLarge && search.cluster().speeds.empty();
     },
     [](PlanSearch& search) {
       search.take(planCopiedPart(search.problem, search.lower_bound, kFair, kRanksOfParts,
                                  [&](const Problem& part, double lower_bound) {
                                    return planBalanced(part, search.options, lower_bound);
                                  }));
       search.gap_left = !search.best;
     }},
    {"blocks",
     [](const PlanSearch& search) {
       const Cluster& cluster = search.cluster();
       return !search.best && (cluster.speeds.empty() || cluster.ranks <= kLarge);
     },
     [](PlanSearch& search) { search.take(planBlocks(search.problem, search.lower_bound)); }},
    {"blocks by speed",
     [](const PlanSearch& search) { return !search.atBound() && !search.cluster().speeds.empty(); },
     [](PlanSearch& search) { search.take(planBySpeed(search.problem, search.lower_bound)); }},
};

constexpr Candidate<PlanSearch> kGapCandidates[] = {
    {"waves", [](const PlanSearch& search) { return search.gap_left; },
     [](PlanSearch& search) {
       search.take(planWaves(search.problem, search.lower_bound, search.best->makespan));
     }},
    {"all ranks",
     [](const PlanSearch& search) { return search.gap_left && search.small(kRefineLimit); },
     [](PlanSearch& search) { search.take(planUniform(search.problem)); }},
};

constexpr Candidate<PlanSearch> kImprovements[] = {
    {"local search",
     [](const PlanSearch& search) { return search.gap_left && search.small(kRefineLimit); },
     [](PlanSearch& search) {
       search.improve(
           [&](Plan plan) { return refine(search.problem, std::move(plan), search.lower_bound); });
     }},
};

}  // namespace

Plan planBalanced(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  PlanSearch search{problem, options, lower_bound};
  tryAll(kBlockCandidates, search);
  if (search.atBound()) return std::move(search).result();
  if (search.gap_left) search.gap_left = search.best->makespan > lower_bound * (1 + kGoodGap);
  tryAll(kGapCandidates, search);
  tryBaselines(search);
  tryAll(kImprovements, search);
  return std::move(search).result();
}

}  // namespace hdpcomm::planner
