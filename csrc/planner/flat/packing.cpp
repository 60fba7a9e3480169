#include "planner/flat/packing.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>

#include "planner/flat/block_list.hpp"
#include "planner/model/rings.hpp"
#include "planner/model/round_queue.hpp"

namespace hdpcomm::planner {

ShortFiller::ShortFiller(const CostModel& cost, const std::vector<Job>& jobs)
    : cost_(cost), jobs_(jobs), work_(jobs.size() + 1, 0.0) {
  for (size_t i = jobs.size(); i-- > 0;) work_[i] = work_[i + 1] + timeOf(jobs[i]);
}

double ShortFiller::timeOf(const Job& job) const {
  const double capacity = static_cast<double>(cost_.memory().capacity);
  return job.min_size_s - cost_.params().fixed * (1 - job.load.tokens / capacity);
}

int ShortFiller::speedClass(double speed) {
  return speed == 1 ? 0 : static_cast<int>(std::floor(16 * std::log2(speed)));
}

template <class Blocks>
double ShortFiller::leastEnd(size_t next, const std::vector<Gap>& gaps,
                             const Blocks& blocks) const {
  double last = 0;
  double free_area = 0;  // in seconds of ranks, up to the last one
  for (const Block& block : blocks) last = std::max(last, block.ready);
  for (const Block& block : blocks) free_area += (last - block.ready) * block.count * block.speed;
  for (const Gap& gap : gaps) free_area += (gap.until - gap.start) * gap.count * gap.speed;
  free_area -= work_[next];
  const double rounding = 1e-9 * last;
  return free_area >= 0 ? last : last - free_area / cost_.cluster().ranks - rounding;
}

template <class Blocks>
double ShortFiller::place(size_t next, const std::vector<Gap>& gaps, const Blocks& blocks,
                          double limit) {
  found_.first = next;
  found_.slots.clear();
  found_.slot_of.resize(jobs_.size() - next);
  using Entry = RoundQueue::Entry;
  std::vector<Entry> gap_entries;  // the time left at full speed and the slot, both negated
  for (const Gap& gap : gaps) {
    for (int rank = gap.first; rank < gap.first + gap.count; ++rank) {
      const double left = (gap.until - gap.start) * gap.speed;
      gap_entries.push_back({-left, -static_cast<int32_t>(found_.slots.size())});
      found_.slots.push_back({gap.start, rank});
    }
  }
  RoundQueue gap_slots(std::move(gap_entries));
  double makespan = 0;
  std::map<int, std::vector<Entry>, std::greater<>> tails;  // by speed class, fast ones first
  for (const Block& block : blocks) {
    std::vector<Entry>& tail = tails[speedClass(block.speed)];
    makespan = std::max(makespan, block.ready);
    for (int rank = block.first; rank < block.first + block.count; ++rank) {
      tail.push_back({block.ready, static_cast<int32_t>(found_.slots.size())});
      found_.slots.push_back({block.ready, rank});
    }
  }
  std::vector<RoundQueue> classes;  // time ready and slot of the ranks of about the same speed each
  for (auto& [unused, tail] : tails) classes.emplace_back(std::move(tail));
  for (; next < jobs_.size(); ++next) {
    const Job& job = jobs_[next];
    const double time = timeOf(job);
    if (!gap_slots.empty() && -gap_slots.top().first >= job.min_size_s) {
      const auto [negative_left, slot] = gap_slots.top();
      found_.slot_of[next - found_.first] = -slot;
      gap_slots.replaceTop({negative_left + time, slot});
      continue;
    }
    RoundQueue* ranks = nullptr;
    double first_end = std::numeric_limits<double>::infinity();
    for (RoundQueue& candidates : classes) {
      const auto& [ready, slot] = candidates.top();
      const double end = ready + time / cost_.cluster().speed(found_.slots[slot].rank);
      if (end >= first_end) continue;
      first_end = end;
      ranks = &candidates;
    }
    const int32_t slot = ranks->top().second;
    found_.slot_of[next - found_.first] = slot;
    ranks->replaceTop({first_end, slot});
    makespan = std::max(makespan, first_end);
    if (makespan >= limit) return limit;
  }
  return makespan;
}

template double ShortFiller::leastEnd(size_t, const std::vector<Gap>&, const BlockList&) const;
template double ShortFiller::leastEnd(size_t, const std::vector<Gap>&,
                                      const std::vector<Block>&) const;
template double ShortFiller::place(size_t, const std::vector<Gap>&, const BlockList&, double);
template double ShortFiller::place(size_t, const std::vector<Gap>&, const std::vector<Block>&,
                                   double);

std::vector<MicroBatch> collectPlaced(const Problem& problem, const std::vector<Job>& jobs,
                                      const Packing& packing) {
  std::vector<MicroBatch> batches;
  batches.reserve(packing.placements.size());
  for (const Placement& placement : packing.placements) {
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
