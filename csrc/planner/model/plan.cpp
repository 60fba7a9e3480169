#include "planner/model/plan.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "base/error.hpp"
#include "planner/model/rings.hpp"

namespace hdpcomm::planner {
namespace {

// Bins by the room that they have, those of the same room in the order in which they came to it.
class BinsByRoom {
 public:
  explicit BinsByRoom(int64_t capacity)
      : first_(capacity + 1, -1),
        last_(capacity + 1, -1),
        used_(capacity / kBits + 1, 0),
        used_words_(capacity / kBits / kBits + 1, 0) {}

  void add(int64_t room, int32_t bin) {
    if (static_cast<size_t>(bin) >= next_.size()) next_.resize(bin + 1, -1);
    next_[bin] = -1;
    if (first_[room] < 0) {
      first_[room] = bin;
      used_[room / kBits] |= bit(room);
      used_words_[room / kBits / kBits] |= bit(room / kBits);
    } else {
      next_[last_[room]] = bin;
    }
    last_[room] = bin;
  }

  // The least room of a bin that is not below this; -1 if there is none.
  int64_t leastFrom(int64_t room) const {
    const int64_t word = room / kBits;
    if (const uint64_t found = used_[word] & from(room))
      return word * kBits + std::countr_zero(found);
    const int64_t later = word + 1;  // word
    if (later >= std::ssize(used_)) return -1;
    uint64_t found = used_words_[later / kBits] & from(later);
    for (int64_t at = later / kBits;; found = used_words_[at]) {
      if (found != 0) {
        const int64_t with_bin = at * kBits + std::countr_zero(found);
        return with_bin * kBits + std::countr_zero(used_[with_bin]);
      }
      if (++at == std::ssize(used_words_)) return -1;
    }
  }

  // Takes away the first bin of this room, of which there is one.
  int32_t take(int64_t room) {
    const int32_t bin = first_[room];
    first_[room] = next_[bin];
    if (first_[room] < 0) {
      uint64_t& word = used_[room / kBits];
      word &= ~bit(room);
      if (word == 0) used_words_[room / kBits / kBits] &= ~bit(room / kBits);
    }
    return bin;
  }

 private:
  static constexpr int64_t kBits = 64;

  static uint64_t bit(int64_t at) { return uint64_t{1} << (at % kBits); }
  static uint64_t from(int64_t at) { return ~uint64_t{0} << (at % kBits); }

  std::vector<int32_t> first_, last_;  // bin of each room, or -1
  std::vector<int32_t> next_;          // of each bin, in the order of its room
  std::vector<uint64_t> used_;         // a bit for each room that a bin has
  std::vector<uint64_t> used_words_;   // a bit for each word of these that is not 0
};

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
  constexpr int64_t kFew = 4096;
  const auto count = static_cast<int64_t>(sequences.size());
  if (count > kFew && capacity / kFew < count) {
    BinsByRoom by_room(capacity);
    for (const int32_t sequence : sequences) {
      const int64_t length = lengths[sequence];
      const int64_t tightest = length <= capacity ? by_room.leastFrom(length) : -1;
      auto bin = static_cast<int32_t>(bins.size());
      if (tightest >= 0) {
        bin = by_room.take(tightest);
      } else {
        bins.emplace_back();
      }
      bins[bin].push_back(sequence);
      const int64_t room = (tightest >= 0 ? tightest : capacity) - length;
      if (room > 0) by_room.add(room, bin);
    }
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
