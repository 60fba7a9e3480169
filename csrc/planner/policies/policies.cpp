#include "planner/policies/policies.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "planner/bound/bound.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr int kPoolRanks = 256;  // that one counter answers
// Ranks from which on no baselines are tried for what is bound: they would take long, and were
// better in none of the steps that were tried.
constexpr int kLarge = 1 << 14;
// What a rank waits for the counter's answer: of its own host, of another one.
constexpr double kAskSeconds[] = {5e-6, 200e-6};
// A queue may be longer than the plan without one by this share, as predicted: what nobody predicts
// speaks for it.
constexpr double kWorthIt = 0.01;
constexpr double kLeastPack = 8;  // fixed costs of a micro-batch that its sequences take at least
// A micro-batch takes this part of what would be each rank's share of all that is left (guided
// self-scheduling).
constexpr double kShares[] = {0.25, 0.5, 1.0};
constexpr double kNever = std::numeric_limits<double>::infinity();
// Shares of the makespan: sequences that take longer on one rank may be bound as well as wait.
constexpr double kShort[] = {kNever, 0.06};
// A later try has to be better than the ones before by this share: they have more in the queue, and
// in smaller parts.
constexpr double kBetter = 0.002;

struct Pack {
  std::vector<int32_t> sequences;
  double seconds = 0;
};

// Micro-batches of these sequences, which are sorted by falling time: smaller and smaller ones.
std::vector<Pack> packGuided(const Problem& problem, const std::vector<int32_t>& sequences,
                             double share) {
  const CostModel& cost = problem.cost();
  const double fixed = cost.params().fixed;
  const int64_t capacity = cost.memory().capacity;
  double left = 0;
  for (const int32_t each : sequences) left += cost.seconds(problem.own(each), 1) - fixed;
  std::vector<Pack> packs;
  Load load;
  double limit = 0;
  for (const int32_t each : sequences) {
    Load more = load;
    more += problem.own(each);
    const bool fits =
        more.tokens <= static_cast<double>(capacity) && cost.seconds(more, 1) - fixed <= limit;
    if (packs.empty() || !fits) {
      if (!packs.empty()) left -= packs.back().seconds - fixed;
      packs.emplace_back();
      load = {};
      limit = std::max(share * left / problem.ranks(), kLeastPack * fixed);
    }
    load += problem.own(each);
    packs.back().sequences.push_back(each);
    packs.back().seconds = cost.seconds(load, 1);
  }
  std::stable_sort(packs.begin(), packs.end(),
                   [](const Pack& a, const Pack& b) { return a.seconds > b.seconds; });
  return packs;
}

// What waits in a queue after what is bound to ranks, in its order and priced.
struct Candidate {
  std::vector<MicroBatch> bound;
  std::vector<int32_t> waiting;
};

// The ranks that take the micro-batches of a queue, and when all have ended.
struct Taken {
  std::vector<int32_t> ranks;
  double makespan = 0;
};

// As predicted: whoever is free first takes the next one.
Taken takeInTurn(const Problem& problem, const std::vector<MicroBatch>& bound,
                 const std::vector<Pack>& packs) {
  const Cluster& cluster = problem.cost().cluster();
  const double ask = kAskSeconds[problem.ranks() > cluster.ranks_per_node];
  std::vector<double> ready(problem.ranks(), 0.0);
  Taken taken;
  for (const MicroBatch& batch : bound) {
    double end = 0;
    for (const int32_t rank : batch.ranks) end = std::max(end, ready[rank]);
    end += batch.predicted_s;
    for (const int32_t rank : batch.ranks) ready[rank] = end;
    taken.makespan = std::max(taken.makespan, end);
  }
  std::vector<RoundQueue::Entry> entries;
  for (int32_t rank = 0; rank < problem.ranks(); ++rank) entries.emplace_back(ready[rank], rank);
  RoundQueue free(std::move(entries));
  for (const Pack& pack : packs) {
    const auto [when, rank] = free.top();
    const double end = when + ask + pack.seconds / cluster.speed(rank);
    taken.ranks.push_back(rank);
    taken.makespan = std::max(taken.makespan, end);
    free.replaceTop({end, rank});
  }
  return taken;
}

// The plan of that.
Plan planOf(const Problem& problem, std::vector<MicroBatch> batches, std::vector<Pack> packs,
            const std::vector<int32_t>& takers) {
  batches.reserve(batches.size() + packs.size());
  for (size_t i = 0; i < packs.size(); ++i) {
    MicroBatch batch;
    batch.ranks = {takers[i]};
    batch.sequences = std::move(packs[i].sequences);
    batches.push_back(std::move(batch));
  }
  for (size_t i = 0; i < batches.size(); ++i) batches[i].start = static_cast<double>(i);
  return finishPlan(problem, std::move(batches));
}

// Those that take longest first.
void sortByTime(const Problem& problem, std::vector<int32_t>& sequences) {
  constexpr size_t kFew = 4096;
  if (sequences.size() > kFew) {  // longer ones mostly take longer, and lengths are sorted faster
    std::vector<bool> there(problem.count(), false);
    for (const int32_t each : sequences) there[each] = true;
    sequences = problem.byLength();
    std::erase_if(sequences, [&](int32_t each) { return !there[each]; });
  }
  std::vector<std::pair<double, int32_t>> by_time;  // negated
  by_time.reserve(sequences.size());
  for (const int32_t each : sequences) {
    by_time.emplace_back(-problem.cost().seconds(problem.own(each), 1), each);
  }
  if (std::is_sorted(by_time.begin(), by_time.end())) return;
  std::sort(by_time.begin(), by_time.end());
  for (size_t i = 0; i < by_time.size(); ++i) sequences[i] = by_time[i].second;
}

// Whether a sequence can wait: it fits a rank without offload, and nothing rides on it.
bool canWait(const Problem& problem, int sequence) {
  return problem.lengths()[sequence] <= problem.cost().memory().capacity &&
         !problem.rides(sequence) && problem.load(sequence).tokens == problem.own(sequence).tokens;
}

// The sequences that can wait and take at most `longest` seconds, those that take longest first.
std::vector<int32_t> shortOnes(const Problem& problem, double longest) {
  std::vector<int32_t> found;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (canWait(problem, i) && problem.cost().seconds(problem.own(i), 1) <= longest) {
      found.push_back(i);
    }
  }
  sortByTime(problem, found);
  return found;
}

// These sequences wait; the others are planned as if there were no more.
Candidate waitingAll(const Problem& problem, PolicyOptions options, std::vector<int32_t> waiting) {
  options.baselines = problem.ranks() < kLarge;
  Candidate found;
  found.waiting = std::move(waiting);
  std::vector<bool> waits(problem.count(), false);
  for (const int32_t each : found.waiting) waits[each] = true;
  std::vector<int32_t> others;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (!waits[i]) others.push_back(i);
  }
  if (others.empty()) return found;
  const Problem rest = problem.part(others, problem.cost());
  Plan plan = planPolicy(rest, "balanced", options, lowerBound(rest));
  for (MicroBatch& batch : plan.micro_batches) {
    for (int32_t& sequence : batch.sequences) sequence = others[sequence];
  }
  found.bound = std::move(plan.micro_batches);
  for (size_t i = 0; i < found.bound.size(); ++i) found.bound[i].start = static_cast<double>(i);
  return found;
}

// The micro-batches of a plan that ranks share or that keep memory by offload, with what comes
// before them on these ranks; what ranks run by themselves after them waits.
Candidate waitingTails(const Problem& problem, const Plan& plan) {
  std::vector<bool> shared(plan.micro_batches.size(), false);
  std::vector<bool> alone(problem.ranks(), true);
  Candidate found;
  for (size_t i = shared.size(); i-- > 0;) {  // the last ones of ranks first
    const MicroBatch& batch = plan.micro_batches[i];
    if (batch.ranks.size() == 1 && batch.offload == 0 && alone[batch.ranks.front()]) {
      found.waiting.insert(found.waiting.end(), batch.sequences.begin(), batch.sequences.end());
      continue;
    }
    shared[i] = true;
    for (const int32_t member : batch.ranks) alone[member] = false;
  }
  for (size_t i = 0; i < shared.size(); ++i) {
    if (shared[i]) found.bound.push_back(plan.micro_batches[i]);
  }
  sortByTime(problem, found.waiting);
  return found;
}

}  // namespace

Plan planPolicy(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound) {
  const auto named = [&](Plan plan) {
    plan.made_by = policy;
    return plan;
  };
  if (policy == "static") return named(planStatic(problem, options));
  if (policy == "naive") return named(planNaive(problem));
  if (policy == "pow2") return named(planPow2(problem));
  if (policy == "balanced" || policy == "pipeline") {
    const auto plan = problem.cost().cluster().pipeline > 1 ? planPipeline : planBalanced;
    return plan(problem, options, lower_bound);
  }
  throwInvalidUsage("policy is '" + policy +
                    "', expected static, naive, balanced, pipeline or pow2");
}

QueuedPlan planQueue(const Problem& problem, const PolicyOptions& options, Plan bound) {
  if (problem.ranks() == 1) return {std::move(bound)};
  Candidate best;
  std::vector<Pack> best_packs;
  Taken best_taken{{}, kNever};
  double best_share = 0;
  const auto attempt = [&](Candidate candidate) {
    if (candidate.waiting.empty()) return;
    const bool first = best_packs.empty();
    bool better = false;
    for (const double share : kShares) {
      if (!first && share != best_share) continue;  // the size that was best for another one
      std::vector<Pack> packs = packGuided(problem, candidate.waiting, share);
      Taken taken = takeInTurn(problem, candidate.bound, packs);
      if (taken.makespan >= best_taken.makespan * (1 - kBetter)) continue;
      better = true;
      best_share = share;
      best_packs = std::move(packs);
      best_taken = std::move(taken);
    }
    if (better) best = std::move(candidate);
  };
  size_t most = 0;  // sequences that waited
  for (const double share : kShort) {
    std::vector<int32_t> waiting = shortOnes(problem, share * bound.makespan);
    const bool same = waiting.size() == std::exchange(most, waiting.size());
    if (waiting.empty() || same) continue;
    attempt(waitingAll(problem, options, std::move(waiting)));
  }
  attempt(waitingTails(problem, bound));
  if (best_packs.empty() || best_taken.makespan > bound.makespan * (1 + kWorthIt)) {
    return {std::move(bound)};
  }
  QueuedPlan found;
  found.queued = static_cast<int>(best_packs.size());
  found.pools = (problem.ranks() + kPoolRanks - 1) / kPoolRanks;
  found.plan = planOf(problem, std::move(best.bound), std::move(best_packs), best_taken.ranks);
  found.plan.made_by = bound.made_by + " + queue";
  return found;
}

}  // namespace hdpcomm::planner
