// For comparison: groups of 2^k ranks on aligned places, as with process groups created in advance.
// Longest sequences first, each on the place that becomes free first.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/baselines/baselines.hpp"
#include "planner/baselines/least_step.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/rings.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// When ranks become free, and the aligned places of one size by that time. Sequences come longest
// first, so the size changes seldom.
class AlignedRanks {
 public:
  explicit AlignedRanks(int ranks) : ready_(ranks, 0.0) {}

  // First rank of the aligned place of `size` ranks that becomes free first, and when.
  std::pair<int, double> earliest(int size) {
    if (size != size_) sortPlaces(size);
    const auto [ready, first] = places_.top();
    return {first, ready};
  }
  // The place that earliest() gave is busy until then.
  void occupyEarliest(double until) {
    const int first = places_.top().second;
    places_.replaceTop({until, first});
    std::fill_n(ready_.begin() + first, size_, until);
  }
  double busyUntil(int rank) const { return ready_[rank]; }

 private:
  void sortPlaces(int size) {
    size_ = size;
    std::vector<RoundQueue::Entry> places;
    const int ranks = static_cast<int>(ready_.size());
    for (int first = 0; first + size <= ranks; first += size) {
      const auto begin = ready_.begin() + first;
      places.push_back({*std::max_element(begin, begin + size), first});
    }
    places_ = RoundQueue(std::move(places));
  }

  std::vector<double> ready_;
  RoundQueue places_{{}};  // when it is free, and its first rank
  int size_ = 0;
};

// The smallest power of two of ranks that holds the sequence, at most the whole cluster.
int groupSize(const Problem& problem, int32_t sequence) {
  const int size =
      static_cast<int>(std::bit_ceil(static_cast<uint32_t>(problem.minRanks(sequence))));
  return size <= problem.ranks() ? size : problem.ranks();
}

// What runs on a place, and from when on.
struct Dealt {
  int first = 0;
  int size = 1;
  double start = 0;
  std::vector<int32_t> sequences;
};

double secondsOf(const Problem& problem, const Dealt& dealt) {
  const CostModel& cost = problem.cost();
  const Cluster& cluster = cost.cluster();
  Load load;
  for (const int32_t sequence : dealt.sequences) load += problem.own(sequence);
  const Scope scope = cluster.scope(dealt.first, dealt.first + dealt.size - 1);
  const double messages =
      cluster.sharesLinks() ? crowding(ringOrder(dealt.first, dealt.size, cluster), cluster) : 1;
  return cost.seconds(load, dealt.size, scope, messages) / cluster.slowest(dealt.first, dealt.size);
}

}  // namespace

double leastPow2(const Problem& problem) {
  return leastStep(problem, [&](int32_t sequence) { return groupSize(problem, sequence); });
}

Plan planPow2(const Problem& problem, double limit) {
  const int64_t capacity = problem.cost().memory().capacity;
  if (problem.cost().cluster().pipeline > 1) limit = kNoLimit;  // ranks do not run like that
  AlignedRanks ranks(problem.ranks());
  std::vector<Dealt> all;
  Plan plan;
  // Returns when it ends.
  const auto deal = [&](Dealt dealt) {
    const double end = dealt.start + secondsOf(problem, dealt);
    plan.makespan = std::max(plan.makespan, end);
    all.push_back(std::move(dealt));
    return end;
  };
  std::vector<int32_t> short_ones;
  for (const int32_t sequence : problem.byLength()) {
    if (problem.lengths()[sequence] <= capacity) {
      short_ones.push_back(sequence);
      continue;
    }
    if (problem.rides(sequence)) continue;
    const int size = groupSize(problem, sequence);
    const auto [first, start] = ranks.earliest(size);
    ranks.occupyEarliest(deal({first, size, start, problem.withRiders(sequence)}));
    if (plan.makespan >= limit) return plan;
  }
  std::vector<RoundQueue::Entry> entries;
  for (int rank = 0; rank < problem.ranks(); ++rank) {
    entries.emplace_back(ranks.busyUntil(rank), rank);
  }
  RoundQueue free(std::move(entries));
  for (auto& pack : packBestFit(problem.lengths(), short_ones, capacity)) {
    const auto [start, rank] = free.top();
    free.replaceTop({deal({rank, 1, start, std::move(pack)}), rank});
    if (plan.makespan >= limit) return plan;
  }
  std::vector<MicroBatch> batches(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    batches[i].ranks = ringOrder(all[i].first, all[i].size, problem.cost().cluster());
    batches[i].sequences = std::move(all[i].sequences);
    batches[i].start = all[i].start;
  }
  return finishPlan(problem, std::move(batches), limit);
}

}  // namespace hdpcomm::planner
