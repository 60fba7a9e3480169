// For comparison: groups of 2^k ranks on aligned places, as with process groups created in advance.
// Longest sequences first, each on the place that becomes free first.
#include <algorithm>
#include <bit>
#include <queue>

#include "planner/plan.hpp"

namespace hdpcomm::planner {
namespace {

class AlignedRanks {
 public:
  explicit AlignedRanks(int ranks) : ready_(ranks, 0.0) {}

  // First rank of the aligned place of `size` ranks that becomes free first.
  int earliest(int size) const {
    int best = 0;
    double best_time = busyUntil(0, size);
    const int ranks = static_cast<int>(ready_.size());
    for (int first = size; first + size <= ranks && best_time > 0; first += size) {
      const double time = busyUntil(first, size);
      if (time < best_time) {
        best = first;
        best_time = time;
      }
    }
    return best;
  }
  double busyUntil(int first, int size) const {
    return *std::max_element(ready_.begin() + first, ready_.begin() + first + size);
  }
  void occupy(int first, int size, double until) {
    std::fill_n(ready_.begin() + first, size, until);
  }

 private:
  std::vector<double> ready_;
};

// The smallest power of two of ranks that holds the sequence, at most the whole cluster.
int groupSize(const Problem& problem, int32_t sequence) {
  const int size =
      static_cast<int>(std::bit_ceil(static_cast<uint32_t>(problem.minRanks(sequence))));
  return size <= problem.ranks() ? size : problem.ranks();
}

MicroBatch makeBatch(const Problem& problem, int first, int size, std::vector<int32_t> sequences) {
  MicroBatch batch;
  batch.ranks = ringOrder(first, size);
  batch.sequences = std::move(sequences);
  price(problem, batch);
  return batch;
}

}  // namespace

double leastPow2(const Problem& problem) {
  const CostModel& cost = problem.cost();
  const int64_t capacity = cost.memory().capacity;
  double work = 0;
  for (int32_t i = 0; i < problem.count(); ++i) {
    if (problem.lengths()[i] <= capacity) {
      work += cost.leastWork(problem.load(i));
    } else if (!problem.rides(i)) {
      const int size = groupSize(problem, i);
      work += size * cost.seconds(problem.load(i), size);
    }
  }
  return work / problem.ranks();
}

Plan planPow2(const Problem& problem) {
  const int64_t capacity = problem.cost().memory().capacity;
  AlignedRanks ranks(problem.ranks());
  std::vector<MicroBatch> batches;
  std::vector<int32_t> short_ones;
  for (const int32_t sequence : problem.byLength()) {
    if (problem.lengths()[sequence] <= capacity) {
      short_ones.push_back(sequence);
      continue;
    }
    if (problem.rides(sequence)) continue;
    const int size = groupSize(problem, sequence);
    const int first = ranks.earliest(size);
    batches.push_back(makeBatch(problem, first, size, problem.withRiders(sequence)));
    batches.back().start = ranks.busyUntil(first, size);
    ranks.occupy(first, size, batches.back().start + batches.back().predicted_s);
  }
  using Entry = std::pair<double, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> free;
  for (int rank = 0; rank < problem.ranks(); ++rank) free.push({ranks.busyUntil(rank, 1), rank});
  for (auto& pack : packBestFit(problem.lengths(), short_ones, capacity)) {
    const auto [start, rank] = free.top();
    free.pop();
    batches.push_back(makeBatch(problem, rank, 1, std::move(pack)));
    batches.back().start = start;
    free.push({start + batches.back().predicted_s, rank});
  }
  return finishPlan(problem, std::move(batches));
}

}  // namespace hdpcomm::planner
