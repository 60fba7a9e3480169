#include "planner/baselines/baselines.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/rings.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

// What no plan can beat whose long sequences have groups of given sizes: the even split of all
// work, or the longest group on all devices of its ranks, one after the other; `size_of` gives the
// ranks of a sequence that does not fit into one.
template <typename SizeOf>
double leastStep(const Problem& problem, SizeOf size_of) {
  const CostModel& cost = problem.cost();
  const int64_t capacity = cost.memory().capacity;
  double work = 0;
  double longest = 0;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (problem.lengths()[i] <= capacity) {
      work += cost.leastWork(problem.load(i));
    } else if (!problem.rides(i)) {
      const int size = size_of(i);
      const double time = cost.seconds(problem.load(i), size);
      work += size * time;
      longest = std::max(longest, time);
    }
  }
  return std::max(work / problem.ranks(), longest * cost.cluster().pipeline);
}

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

class GroupSizes {
 public:
  explicit GroupSizes(const Problem& problem) : problem_(problem), cost_(problem.cost()) {
    for (int32_t i = 0; i < problem.count(); ++i) {
      if (problem.rides(i)) continue;
      const Load load = problem.load(i);
      const int size = withoutOffload(load);
      mean_load_ += size * cost_.seconds(load, size) / problem.ranks();
    }
  }

  int of(int32_t sequence) const {
    const Load load = problem_.load(sequence);
    const int least = problem_.minRanks(sequence);
    const int most = std::max(least, withoutOffload(load));
    const int size = cost_.sizeWithin(load, least, most, mean_load_);
    return size > 0 ? size : most;
  }

 private:
  int withoutOffload(const Load& load) const {
    const double size = std::ceil(load.tokens / static_cast<double>(cost_.memory().capacity));
    return static_cast<int>(std::min<double>(size, problem_.ranks()));
  }

  const Problem& problem_;
  const CostModel& cost_;
  double mean_load_ = 0;
};

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
int powerOfTwo(const Problem& problem, int32_t sequence) {
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
  const double messages = cluster.sharesInterfaces()
                              ? crowding(ringOrder(dealt.first, dealt.size, cluster), cluster)
                              : 1;
  return cost.seconds(load, dealt.size, scope, messages) / cluster.slowest(dealt.first, dealt.size);
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

// The baseline: a fixed DP x CP mesh. Sequences are packed up to what a context-parallel group
// holds, every pack is cut over its whole group, and the groups get the same number of packs.
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

double leastNaive(const Problem& problem) {
  const GroupSizes sizes(problem);
  return leastStep(problem, [&](int32_t sequence) { return sizes.of(sequence); });
}

// Algorithm 1 of the paper: each long sequence takes as many ranks as its memory needs, the short
// ones are packed up to the capacity, and all ranks get about the same number of micro-batches.
// With offload, the fewest ranks that hold a sequence can make it many times longer than the whole
// step (2M tokens fit on 16 ranks instead of 256), which the paper leaves open; here a sequence
// takes fewer ranks only as long as its time does not exceed the mean load of a rank.
Plan planNaive(const Problem& problem, double limit) {
  struct Piece {
    int32_t sequence;
    int size;
  };
  std::vector<Piece> pieces;  // that do not fit one rank
  const int64_t capacity = problem.cost().memory().capacity;
  const GroupSizes sizes(problem);
  for (int32_t sequence = 0; sequence < problem.count(); ++sequence) {
    if (problem.lengths()[sequence] > capacity && !problem.rides(sequence)) {
      pieces.push_back({sequence, sizes.of(sequence)});
    }
  }
  std::vector<RoundQueue::Entry> entries;  // micro-batches and rank
  for (int32_t rank = 0; rank < problem.ranks(); ++rank) entries.emplace_back(0, rank);
  RoundQueue ranks(std::move(entries));
  LimitCheck check(problem, limit);
  std::vector<MicroBatch> batches;
  batches.reserve(pieces.size());
  // False where the plan is late.
  const auto deal = [&](std::vector<int32_t> sequences, int size) {
    MicroBatch& batch = batches.emplace_back();
    batch.sequences = std::move(sequences);
    batch.ranks.reserve(size);
    for (int i = 0; i < size; ++i) {  // no rank is next again before all others were
      const auto [count, rank] = ranks.top();
      batch.ranks.push_back(rank);
      ranks.replaceTop({count + 1, rank});
    }
    std::sort(batch.ranks.begin(), batch.ranks.end());
    return !check.late(batch);
  };
  for (const auto& [sequence, size] : pieces) {
    if (!deal(problem.withRiders(sequence), size)) return check.latePlan();
  }
  std::vector<int32_t> short_ones;
  for (const int32_t sequence : problem.byLength()) {
    if (problem.lengths()[sequence] <= capacity) short_ones.push_back(sequence);
  }
  for (auto& bin : packBestFit(problem.lengths(), short_ones, capacity)) {
    if (!deal(std::move(bin), 1)) return check.latePlan();
  }
  return finishWithRings(problem, std::move(batches), limit);
}

double leastPow2(const Problem& problem) {
  return leastStep(problem, [&](int32_t sequence) { return powerOfTwo(problem, sequence); });
}

// For comparison: groups of 2^k ranks on aligned places, as with process groups created in advance.
// Longest sequences first, each on the place that becomes free first.
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
    const int size = powerOfTwo(problem, sequence);
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
