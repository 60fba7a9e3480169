#include "planner/model/plan.hpp"

#include <algorithm>
#include <map>

#include "planner/model/rings.hpp"

namespace hdpcomm::planner {

Scope scopeOf(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept {
  const auto [first, last] = std::minmax_element(ranks.begin(), ranks.end());
  return cluster.scope(*first, *last);
}

double slowest(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept {
  double speed = 1;
  for (const int32_t rank : ranks) speed = std::min(speed, cluster.speed(rank));
  return speed;
}

Work workOf(const Problem& problem, const MicroBatch& batch) noexcept {
  const auto size = static_cast<int64_t>(batch.ranks.size());
  Work work;
  for (const int32_t sequence : batch.sequences) {
    work.load += problem.own(sequence);
    work.held += (problem.lengths()[sequence] + size - 1) / size;
  }
  return work;
}

void price(const Problem& problem, MicroBatch& batch) {
  const CostModel& cost = problem.cost();
  const int size = static_cast<int>(batch.ranks.size());
  const auto [load, held] = workOf(problem, batch);
  batch.predicted_s = cost.seconds(load, size, scopeOf(batch.ranks, cost.cluster()),
                                   crowding(batch.ranks, cost.cluster())) /
                      slowest(batch.ranks, cost.cluster());
  batch.offload = cost.offloadFor(static_cast<double>(held));
}

std::vector<std::vector<int32_t>> packBestFit(const std::vector<int64_t>& lengths,
                                              const std::vector<int32_t>& sequences,
                                              int64_t capacity) {
  std::vector<std::vector<int32_t>> bins;
  int64_t all = 0;
  for (const int32_t sequence : sequences) all += lengths[sequence];
  if (all <= capacity) {  // each would go to the first bin
    if (!sequences.empty()) bins.push_back(sequences);
    return bins;
  }
  std::multimap<int64_t, int32_t> by_room;  // tokens still free -> bin
  for (const int32_t sequence : sequences) {
    const int64_t length = lengths[sequence];
    const auto tightest = by_room.lower_bound(length);
    int32_t bin = static_cast<int32_t>(bins.size());
    int64_t room = capacity;
    if (tightest != by_room.end()) {
      room = tightest->first;
      bin = tightest->second;
      by_room.erase(tightest);
    } else {
      bins.emplace_back();
    }
    bins[bin].push_back(sequence);
    if (room > length) by_room.emplace(room - length, bin);
  }
  return bins;
}

}  // namespace hdpcomm::planner
