// Algorithm 1 of the paper: each long sequence takes as many ranks as its memory needs, the short
// ones are packed up to the capacity, and all ranks get about the same number of micro-batches.
// With offload, the fewest ranks that hold a sequence can make it many times longer than the whole
// step (2M tokens fit on 16 ranks instead of 256), which the paper leaves open; here a sequence
// takes fewer ranks only as long as its time does not exceed the mean load of a rank.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/baselines/baselines.hpp"
#include "planner/baselines/least_step.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/model/window_maxima.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

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

// Neighbouring ranks, those with the fewest micro-batches; `counts`: of each rank, which this
// raises.
std::vector<int32_t> takeNeighbours(int size, std::vector<int>& counts) {
  const std::vector<int> most = windowMaxima(counts, size);
  const auto first = std::min_element(most.begin(), most.end()) - most.begin();
  std::vector<int32_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), static_cast<int32_t>(first));
  std::fill_n(counts.begin() + first, size, most[first] + 1);
  return ranks;
}

}  // namespace

double leastNaive(const Problem& problem) {
  const GroupSizes sizes(problem);
  return leastStep(problem, [&](int32_t sequence) { return sizes.of(sequence); });
}

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
  std::vector<int> counts(problem.ranks(), 0);
  std::vector<std::vector<int32_t>> neighbours(pieces.size());
  if (problem.cost().cluster().neighbours) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].size > 1) neighbours[i] = takeNeighbours(pieces[i].size, counts);
    }
  }
  std::vector<RoundQueue::Entry> entries;  // micro-batches and rank
  for (int32_t rank = 0; rank < problem.ranks(); ++rank) entries.emplace_back(counts[rank], rank);
  RoundQueue ranks(std::move(entries));
  LimitCheck check(problem, limit);
  std::vector<MicroBatch> batches;
  batches.reserve(pieces.size());
  // False where the plan is late.
  const auto deal = [&](std::vector<int32_t> sequences, int size, std::vector<int32_t> taken) {
    MicroBatch& batch = batches.emplace_back();
    batch.sequences = std::move(sequences);
    batch.ranks = std::move(taken);
    if (batch.ranks.empty()) {
      batch.ranks.reserve(size);
      for (int i = 0; i < size; ++i) {  // no rank is next again before all others were
        const auto [count, rank] = ranks.top();
        batch.ranks.push_back(rank);
        ranks.replaceTop({count + 1, rank});
      }
      std::sort(batch.ranks.begin(), batch.ranks.end());
    }
    return !check.late(batch);
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto [sequence, size] = pieces[i];
    if (!deal(problem.withRiders(sequence), size, std::move(neighbours[i]))) {
      return check.latePlan();
    }
  }
  std::vector<int32_t> short_ones;
  for (const int32_t sequence : problem.byLength()) {
    if (problem.lengths()[sequence] <= capacity) short_ones.push_back(sequence);
  }
  for (auto& bin : packBestFit(problem.lengths(), short_ones, capacity)) {
    if (!deal(std::move(bin), 1, {})) return check.latePlan();
  }
  return finishWithRings(problem, std::move(batches), limit);
}

}  // namespace hdpcomm::planner
