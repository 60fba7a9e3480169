#include "planner/flat/packing.hpp"

#include <algorithm>
#include <numeric>

#include "planner/model/rings.hpp"

namespace hdpcomm::planner {

std::vector<MicroBatch> placedBatches(const Problem& problem, const std::vector<Job>& jobs,
                                      const std::vector<Placement>& placements) {
  std::vector<MicroBatch> batches;
  batches.reserve(placements.size());
  for (const Placement& placement : placements) {
    MicroBatch batch;
    std::vector<int32_t> ranks(placement.ranks.count);
    std::iota(ranks.begin(), ranks.end(), placement.ranks.first);
    for (const auto& [first, count] : placement.more) {
      for (int rank = first; rank < first + count; ++rank) ranks.push_back(rank);
    }
    if (!placement.more.empty()) std::sort(ranks.begin(), ranks.end());
    batch.ranks = ringOrder(std::move(ranks), problem.cost().cluster());
    batch.sequences = problem.withRiders(jobs[placement.job].sequence);
    batch.start = placement.start;
    batches.push_back(std::move(batch));
  }
  return batches;
}

std::vector<MicroBatch> collectPlaced(const Problem& problem, const std::vector<Job>& jobs,
                                      const Packing& packing) {
  std::vector<MicroBatch> batches = placedBatches(problem, jobs, packing.placements);
  const int64_t capacity = problem.cost().memory().capacity;
  // The sequences of each slot, in the order of the jobs.
  std::vector<int32_t> ends(packing.short_jobs.slots.size() + 1, 0);
  for (const int32_t slot : packing.short_jobs.slot_of) ++ends[slot + 1];
  std::partial_sum(ends.begin(), ends.end(), ends.begin());
  std::vector<int32_t> sequences(packing.short_jobs.slot_of.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[ends[packing.short_jobs.slot_of[i]]++] = jobs[packing.short_jobs.first + i].sequence;
  }
  int32_t begin = 0;
  for (size_t which = 0; which < packing.short_jobs.slots.size(); ++which) {
    const Slot& slot = packing.short_jobs.slots[which];
    double start = slot.start;
    const std::vector<int32_t> own(sequences.begin() + begin, sequences.begin() + ends[which]);
    begin = ends[which];
    for (auto& bin : packBestFit(problem.lengths(), own, capacity)) {
      MicroBatch batch;
      batch.ranks = {slot.rank};
      batch.sequences = std::move(bin);
      batch.start = start;
      price(problem, batch);
      start += batch.predicted_s;
      batches.push_back(std::move(batch));
    }
  }
  return batches;
}

}  // namespace hdpcomm::planner
