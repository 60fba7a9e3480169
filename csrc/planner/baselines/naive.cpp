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
    std::vector<int32_t> sequences;
    int size;
  };
  std::vector<Piece> pieces;
  std::vector<int32_t> short_ones;
  const int64_t capacity = problem.cost().memory().capacity;
  for (const int32_t sequence : problem.byLength()) {
    if (problem.lengths()[sequence] <= capacity) short_ones.push_back(sequence);
  }
  const GroupSizes sizes(problem);
  for (int32_t sequence = 0; sequence < problem.count(); ++sequence) {
    if (problem.lengths()[sequence] > capacity && !problem.rides(sequence)) {
      pieces.push_back({problem.withRiders(sequence), sizes.of(sequence)});
    }
  }
  for (auto& bin : packBestFit(problem.lengths(), short_ones, capacity)) {
    pieces.push_back({std::move(bin), 1});
  }
  std::vector<int> counts(problem.ranks(), 0);
  std::vector<MicroBatch> batches(pieces.size());
  const bool neighbours = problem.cost().cluster().neighbours;
  if (neighbours) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i].size > 1) batches[i].ranks = takeNeighbours(pieces[i].size, counts);
    }
  }
  std::vector<RoundQueue::Entry> entries;  // micro-batches and rank
  for (int32_t rank = 0; rank < problem.ranks(); ++rank) entries.emplace_back(counts[rank], rank);
  RoundQueue ranks(std::move(entries));
  for (size_t which = 0; which < pieces.size(); ++which) {
    Piece& piece = pieces[which];
    MicroBatch& batch = batches[which];
    batch.sequences = std::move(piece.sequences);
    if (!batch.ranks.empty()) continue;
    batch.ranks.reserve(piece.size);
    for (int i = 0; i < piece.size; ++i) {  // no rank is next again before all others were
      const auto [count, rank] = ranks.top();
      batch.ranks.push_back(rank);
      ranks.replaceTop({count + 1, rank});
    }
    std::sort(batch.ranks.begin(), batch.ranks.end());
  }
  return finishWithRings(problem, std::move(batches), limit);
}

}  // namespace hdpcomm::planner
