// The last operations of a rank, kept so that they can be looked at when something is stuck: what
// was called, with whom, when, and whether it has ended (docs/how-to/flight-recorder.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/call.hpp"

namespace hdpcomm {

// A collective, or one message. One cache line, since each operation writes one.
struct FlightRecord {
  enum class State : uint8_t { kUnderWay, kQueued, kDone, kFailed };

  Call call;             // count and dtype of a message: its own
  uint64_t started = 0;  // ticks
  uint64_t ended = 0;    // ticks; 0: it has not
  int64_t seq = -1;      // the operation's number on this rank
  // Which collective of these ranks it is, or the message's number on its pair and direction: equal
  // on all ranks that take part.
  uint64_t order = 0;
  int32_t peer = -1;  // global rank; -1: a collective
  State state = State::kUnderWay;
  bool sends = false;  // a message: from this rank
};
static_assert(sizeof(FlightRecord) == 64);

// "all_reduce #17 ended"
std::string describe(const FlightRecord& record);

// Not thread-safe: used under the lock of the world or engine whose operations it records.
class FlightRecorder {
 public:
  // The records of one operation: the numbers from `first` on.
  struct Entry {
    uint64_t first = 0;
    uint64_t count = 0;
  };

  // Keeps at least the last `capacity` records (a power of two of them); 0: none.
  explicit FlightRecorder(size_t capacity);

  bool on() const { return !records_.empty(); }
  // Enter an operation that begins, one message after the other.
  void add(Entry& entry, const Call& call, const std::vector<int>& ranks, int64_t seq) {
    FlightRecord& record = next(entry, call, seq);
    record.order = groupOf(call, ranks).collectives++;
  }
  void addMessage(Entry& entry, const Call& call, int64_t seq, int peer, bool sends,
                  uint64_t number) {
    FlightRecord& record = next(entry, call, seq);
    record.order = number;
    record.peer = peer;
    record.sends = sends;
  }
  void end(const Entry& entry, FlightRecord::State state) {
    for (uint64_t i = entry.first; i < entry.first + entry.count; ++i) {
      if (next_ - i > records_.size()) continue;  // overwritten since
      FlightRecord& record = records_[i & mask_];
      record.state = state;
      record.ended = ticks();
    }
  }

  // The record that was entered last.
  std::optional<FlightRecord> last() const {
    if (next_ == 0) return std::nullopt;
    return records_[(next_ - 1) & mask_];
  }

  // What is kept, in order, with the times in nanoseconds of the system's clock.
  struct Flight {
    uint64_t first = 0;  // the number of the first record
    std::vector<FlightRecord> records;
    std::unordered_map<uint64_t, std::vector<int>> groups;  // by Call::subset_hash: global ranks
  };
  Flight read() const;
  // Marks an operation that has not begun in what read() gave.
  static void markQueued(Flight& flight, const Entry& entry);

 private:
  struct Group {
    uint64_t collectives = 0;
    std::vector<int> ranks;
  };
  struct Recent {
    uint64_t hash = 0;
    Group* group = nullptr;
  };
  static constexpr size_t kRecent = 16;  // a power of two

  // Cycles where the processor counts them, which costs less than to read a clock.
  static uint64_t ticks();
  FlightRecord& next(Entry& entry, const Call& call, int64_t seq) {
    if (entry.count++ == 0) entry.first = next_;
    FlightRecord& record = records_[next_++ & mask_];
    record = FlightRecord{.call = call, .started = ticks(), .seq = seq};
    return record;
  }
  Group& groupOf(const Call& call, const std::vector<int>& ranks) {
    const Recent& recent = recent_[call.subset_hash & (kRecent - 1)];
    if (recent.group != nullptr && recent.hash == call.subset_hash) return *recent.group;
    return lookUp(call.subset_hash, ranks);
  }
  Group& lookUp(uint64_t hash, const std::vector<int>& ranks);

  std::vector<FlightRecord> records_;
  uint64_t mask_ = 0;
  uint64_t next_ = 0;
  Recent recent_[kRecent];
  std::unordered_map<uint64_t, Group> groups_;  // never moves its elements
  uint64_t first_ticks_ = 0;  // a moment, in ticks and in the system's nanoseconds
  int64_t first_ns_ = 0;
};

}  // namespace hdpcomm
