#include "planner/policies/queue.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "planner/bound/bound.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/noise/free_ranks.hpp"
#include "planner/noise/noise_draws.hpp"
#include "planner/policies/policies.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr int kPoolRanks = 256;  // that one counter answers
// Ranks from which on no baselines are tried for what is bound: they would take long, and were
// better in none of the steps that were tried.
constexpr int kLarge = 1 << 14;
// What a rank waits for the counter's answer: of its own host, of another one.
constexpr double kAskSeconds[] = {5e-6, 200e-6};
// Deviation that micro-batches are thought to have where the cost model knows of none: no clock of
// a step was ever without.
constexpr double kAssumedNoise = 0.02;
// A queue may be longer than the plan without one by this share, in the mean: what nobody predicts
// speaks for it.
constexpr double kWorthIt = 0.005;
// Sequences x possible steps that are looked at for each try, and for the best one; and steps.
constexpr size_t kMostTriedTimes = 1 << 17;
constexpr size_t kMostTimes = 1 << 19;
constexpr int kMostLooksTried = 16;
constexpr int kMostLooks = 256;
constexpr int kFewestLooks = 4;
constexpr double kLeastPack = 8;  // fixed costs of a micro-batch that its sequences take at least
// A micro-batch takes this part of what would be each rank's share of all that is left (guided
// self-scheduling).
constexpr double kShares[] = {0.25, 0.5, 1.0};
// Shares of the makespan: sequences that take longer on one rank may be bound as well as wait.
constexpr double kNever = std::numeric_limits<double>::infinity();
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

class Queue {
 public:
  Queue(const Problem& problem, int pools)
      : problem_(problem),
        pools_(pools),
        ask_(kAskSeconds[problem.ranks() > problem.cost().cluster().ranks_per_node]) {}

  // The ranks that take these micro-batches after those of `bound`.
  std::vector<int32_t> takers(const Plan& bound, const std::vector<Pack>& packs) const {
    std::vector<double> ready(problem_.ranks(), 0.0);
    for (const MicroBatch& batch : bound.micro_batches) {
      double end = 0;
      for (const int32_t rank : batch.ranks) end = std::max(end, ready[rank]);
      for (const int32_t rank : batch.ranks) ready[rank] = end + batch.predicted_s;
    }
    std::vector<RoundQueue::Entry> entries;
    for (int32_t rank = 0; rank < problem_.ranks(); ++rank) entries.emplace_back(ready[rank], rank);
    RoundQueue free(std::move(entries));
    std::vector<int32_t> ranks;
    for (const Pack& pack : packs) {
      const auto [when, rank] = free.top();
      ranks.push_back(rank);
      free.replaceTop({when + ask_ + pack.seconds / problem_.cost().cluster().speed(rank), rank});
    }
    return ranks;
  }

  // The plan of that.
  Plan plan(Plan bound, std::vector<Pack> packs, const std::vector<int32_t>& takers) const {
    std::vector<MicroBatch> batches = std::move(bound.micro_batches);
    batches.reserve(batches.size() + packs.size());
    for (size_t i = 0; i < packs.size(); ++i) {
      MicroBatch batch;
      batch.ranks = {takers[i]};
      batch.sequences = std::move(packs[i].sequences);
      batch.predicted_s = packs[i].seconds / problem_.cost().cluster().speed(takers[i]);
      batches.push_back(std::move(batch));
    }
    for (size_t i = 0; i < batches.size(); ++i) batches[i].start = static_cast<double>(i);
    return finishPlan(problem_, std::move(batches), kNever, true);
  }

  // Mean makespan over possible steps, in each of which the ranks take from the queue as they are
  // free then; one that is not below `limit` as soon as that is certain. `takers`: of these
  // packs.
  double mean(const DrawnEnds& bound, const NoiseDraws& draws, const std::vector<Pack>& packs,
              const std::vector<int32_t>& takers, double limit) const {
    struct Waiting {
      double seconds;
      const float* factors;
    };
    std::vector<std::vector<Waiting>> of_pool(pools_);
    for (size_t i = 0; i < packs.size(); ++i) {
      of_pool[takers[i] % pools_].push_back(
          {packs[i].seconds, draws.of(packs[i].sequences.front())});
    }
    std::vector<double> makespans;
    for (int step = 0; step < draws.steps(); ++step) makespans.push_back(bound.makespan(step));
    const auto meanOfAll = [&] {
      return std::accumulate(makespans.begin(), makespans.end(), 0.0) / draws.steps();
    };
    const Cluster& cluster = problem_.cost().cluster();
    const double slowest = cluster.slowest(0, problem_.ranks());
    FreeRanks free;
    for (int pool = 0; pool < pools_ && meanOfAll() < limit; ++pool) {
      const int ranks = (problem_.ranks() - pool + pools_ - 1) / pools_;
      for (int step = 0; step < draws.steps(); ++step) {
        double& makespan = makespans[step];
        double sum = 0;
        for (int32_t rank = pool; rank < problem_.ranks(); rank += pools_) {
          sum += bound.ofRank(rank, step);
        }
        // Who is free first is so no later than the mean of all.
        double latest = 0;
        for (const Waiting& each : of_pool[pool]) {
          const double seconds = ask_ + each.seconds * each.factors[step] / slowest;
          latest = std::max(latest, sum / ranks + seconds);
          sum += seconds;
        }
        if (latest <= makespan * (1 - 1e-9)) continue;
        free.clear();
        for (int32_t rank = pool; rank < problem_.ranks(); rank += pools_) {
          free.add(bound.ofRank(rank, step), rank);
        }
        free.arrange();
        for (const Waiting& each : of_pool[pool]) {
          const double seconds = each.seconds * each.factors[step];
          const double end = free.when() + ask_ + seconds / cluster.speed(free.rank());
          makespan = std::max(makespan, end);
          free.delayFirst(end);
        }
      }
    }
    return meanOfAll();
  }

 private:
  const Problem& problem_;
  int pools_;
  double ask_;
};

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

// These sequences wait; the others are planned as if there were no more, and no noise, which those
// that wait make up for.
Candidate waitingAll(const Problem& problem, PolicyOptions options, std::vector<int32_t> waiting) {
  options.baselines = problem.ranks() < kLarge;
  CostParams params = problem.cost().params();
  params.noise = 0;
  const CostModel cost(params, problem.cost().memory(), problem.cost().cluster());
  Candidate found;
  found.waiting = std::move(waiting);
  std::vector<bool> waits(problem.count(), false);
  for (const int32_t each : found.waiting) waits[each] = true;
  std::vector<int32_t> others;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (!waits[i]) others.push_back(i);
  }
  if (others.empty()) return found;
  const Problem rest = problem.part(others, cost);
  Plan plan = planPolicy(rest, "balanced", options, lowerBound(rest));
  for (MicroBatch& batch : plan.micro_batches) {
    for (int32_t& sequence : batch.sequences) sequence = others[sequence];
  }
  found.bound = std::move(plan.micro_batches);
  for (size_t i = 0; i < found.bound.size(); ++i) found.bound[i].start = static_cast<double>(i);
  return found;
}

}  // namespace

QueuedPlan planQueue(const Problem& problem, const PolicyOptions& options, Plan bound) {
  const double known = problem.cost().params().noise;
  const double noise = known > 0 ? known : kAssumedNoise;
  if (problem.ranks() == 1) return {std::move(bound)};
  const int pools = (problem.ranks() + kPoolRanks - 1) / kPoolRanks;
  const Queue queue(problem, pools);
  const auto count = static_cast<size_t>(problem.count());
  const NoiseDraws draws(count, drawsFor(count, kMostTriedTimes, kFewestLooks, kMostLooksTried),
                         noise);

  QueuedPlan best;
  Plan best_bound;
  std::vector<Pack> best_packs;
  std::vector<int32_t> best_takers;
  double best_mean = kNever;
  double best_share = 0;
  const auto attempt = [&](Candidate candidate) {
    if (candidate.waiting.empty()) return;
    const DrawnEnds ends(problem, candidate.bound, draws, best_mean * (1 - kBetter));
    const double least = ends.meanMakespan();  // whatever waits
    if (least >= best_mean * (1 - kBetter)) return;
    Plan bound_plan;
    bound_plan.micro_batches = std::move(candidate.bound);
    const bool first = best.queued == 0;
    bool better = false;
    for (const double share : kShares) {
      if (!first && share != best_share) continue;  // the size that was best for another one
      const double limit = best_mean * (1 - kBetter);
      if (least >= limit) break;
      std::vector<Pack> packs = packGuided(problem, candidate.waiting, share);
      std::vector<int32_t> takers = queue.takers(bound_plan, packs);
      const double mean = queue.mean(ends, draws, packs, takers, limit);
      if (mean >= limit) continue;
      better = true;
      best_mean = mean;
      best_share = share;
      best.queued = static_cast<int>(packs.size());
      best_packs = std::move(packs);
      best_takers = std::move(takers);
    }
    if (better) best_bound = std::move(bound_plan);
  };
  size_t most = 0;  // sequences that waited
  for (const double share : kShort) {
    std::vector<int32_t> waiting = shortOnes(problem, share * bound.makespan);
    const bool same = waiting.size() == std::exchange(most, waiting.size());
    if (waiting.empty() || same) continue;
    attempt(waitingAll(problem, options, std::move(waiting)));
  }
  Tails tails = takeTails(problem, bound);
  attempt({std::move(tails.shared), std::move(tails.sequences)});
  if (best.queued == 0) return {std::move(bound)};

  // Both by as many possible steps as there is time for.
  const int steps = drawsFor(count, kMostTimes, kFewestLooks, kMostLooks);
  std::optional<NoiseDraws> made;
  if (steps != draws.steps()) {
    made.emplace(count, steps, noise);
    const DrawnEnds ends(problem, best_bound.micro_batches, *made);
    best_mean = queue.mean(ends, *made, best_packs, best_takers, kNever);
  }
  best.plan = queue.plan(std::move(best_bound), std::move(best_packs), best_takers);
  best.mean = std::max(best_mean, best.plan.makespan);
  best.pools = pools;
  const NoiseDraws& all = made ? *made : draws;
  const double without = DrawnEnds(problem, bound.micro_batches, all, best.mean).meanMakespan();
  if (best.mean > without * (1 + kWorthIt)) return {std::move(bound)};
  best.plan.made_by = bound.made_by + " + queue";
  if (known <= 0) best.mean = best.plan.makespan;
  return best;
}

}  // namespace hdpcomm::planner
