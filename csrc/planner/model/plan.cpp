#include "planner/model/plan.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "base/error.hpp"
#include "planner/model/rings.hpp"

namespace hdpcomm::planner {
namespace {

[[noreturn]] void throwNotTogether(size_t micro_batch) {
  throwInvalidUsage("micro-batch " + std::to_string(micro_batch) +
                    " comes between the slices of a sequence, or is one of them on other ranks: "
                    "slices follow each other on the same ranks");
}

}  // namespace

std::vector<int32_t> followingSlices(const Plan& plan) {
  const auto& batches = plan.micro_batches;
  if (std::none_of(batches.begin(), batches.end(),
                   [](const MicroBatch& batch) { return batch.slice.some(); })) {
    return {};
  }
  std::vector<int32_t> following(batches.size(), -1);
  int32_t highest = 0;
  for (const MicroBatch& batch : batches) {
    highest = std::max(highest, *std::max_element(batch.ranks.begin(), batch.ranks.end()));
  }
  std::vector<int32_t> last(static_cast<size_t>(highest) + 1, -1);  // micro-batch by rank
  for (size_t i = 0; i < batches.size(); ++i) {
    const MicroBatch& batch = batches[i];
    const int32_t previous = last[batch.ranks.front()];
    const bool goes_on = previous >= 0 && batches[previous].slice.more;
    for (const int32_t rank : batch.ranks) {
      const int32_t own = last[rank];
      const bool open = own >= 0 && batches[own].slice.more;
      if (open != goes_on || (goes_on && own != previous)) throwNotTogether(i);
      last[rank] = static_cast<int32_t>(i);
    }
    if (goes_on != (batch.slice.first > 0)) throwNotTogether(i);
    if (!goes_on) continue;
    if (batch.ranks != batches[previous].ranks ||
        batch.slice.first != batches[previous].slice.end) {
      throwNotTogether(i);
    }
    following[previous] = static_cast<int32_t>(i);
  }
  return following;
}

std::vector<int32_t> joinedRanks(const Plan& plan, int ranks) {
  std::vector<int32_t> lowest(ranks);
  std::iota(lowest.begin(), lowest.end(), 0);
  const auto find = [&](int32_t rank) {
    while (lowest[rank] != rank) rank = lowest[rank] = lowest[lowest[rank]];
    return rank;
  };
  for (const MicroBatch& batch : plan.micro_batches) {
    for (const int32_t rank : batch.ranks) {
      const int32_t a = find(rank);
      const int32_t b = find(batch.ranks.front());
      lowest[std::max(a, b)] = std::min(a, b);
    }
  }
  for (int32_t rank = 0; rank < ranks; ++rank) lowest[rank] = find(rank);
  return lowest;
}

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
  if (batch.slice.some()) {
    const int64_t tokens = batch.slice.end - batch.slice.first;
    return {{batch.slice.squares, static_cast<double>(tokens)},
            (tokens + size - 1) / size,
            batch.slice.first};
  }
  if (size == 1) {  // mostly; divisions take long
    for (const int32_t sequence : batch.sequences) {
      work.load += problem.own(sequence);
      work.held += problem.lengths()[sequence];
    }
    return work;
  }
  for (const int32_t sequence : batch.sequences) {
    work.load += problem.own(sequence);
    work.held += (problem.lengths()[sequence] + size - 1) / size;
  }
  return work;
}

void price(const Problem& problem, MicroBatch& batch) {
  price(problem, batch, workOf(problem, batch));
}

void price(const Problem& problem, MicroBatch& batch, const Work& work) {
  const CostModel& cost = problem.cost();
  const int size = static_cast<int>(batch.ranks.size());
  const auto& [load, held, kept_tokens] = work;
  const auto kept = static_cast<double>(kept_tokens);
  const Scope scope = scopeOf(batch.ranks, cost.cluster());
  const double messages = crowding(batch.ranks, cost.cluster());
  batch.offload = cost.offloadFor(static_cast<double>(held));
  batch.predicted_s = cost.seconds(load, size, scope, messages, kept);
  const bool again = batch.slice.more && cost.cluster().pipeline == 1;
  if (again || (batch.slice.some() && batch.offload > 0)) {
    const double forward = cost.forwardSeconds(load, size, scope, messages, kept);
    const double to_load = cost.forwardLoad(kept, size, batch.offload);
    const double backward = batch.predicted_s - forward;
    batch.predicted_s += std::max(0.0, to_load - forward) +
                         std::max(0.0, cost.backwardLoad(kept, size, batch.offload) - backward);
    if (again) batch.predicted_s += std::max(forward, to_load);
  }
  batch.predicted_s /= slowest(batch.ranks, cost.cluster());
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
