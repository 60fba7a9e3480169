// Words on which the ranks of a world count together (comm/host/counter.hpp). Each rank owns some;
// the ranks of its host add to them in shared memory, the others by frames that its link answers.
// Plain shared memory: zeros are a valid start.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace hdpcomm {

inline constexpr uint32_t kCounterWords = 16;  // of each rank
inline constexpr uint32_t kMaxCount = std::numeric_limits<uint32_t>::max();

// The upper half is the generation, which differs for each counter that had this word; the lower
// half is the count. Generation 0: no counter has it. A line of its own, so that counters do not
// slow each other.
struct alignas(64) CounterWord {
  std::atomic<uint64_t> value;
};

struct CounterWords {
  CounterWord at[kCounterWords];
};

struct FetchRequest {
  uint32_t word = 0;
  uint32_t generation = 0;
  uint32_t amount = 1;
};

enum class FetchEnd : uint8_t {
  kAdded,
  kClosed,     // the word has another generation now
  kOverflow,   // the sum would be above kMaxCount; nothing was added
  kOwnerLeft,  // the owner has left the world
};

struct FetchResult {
  FetchEnd end = FetchEnd::kClosed;
  uint32_t before = 0;  // the count; 0 if there is none
};

// All orders are relaxed: a count tells nothing about other memory. The owner opens a word before
// it tells the others of it by a message, so they see it open.

inline uint64_t wordOf(uint32_t generation, uint32_t count) {
  return uint64_t{generation} << 32 | count;
}

inline void openWord(CounterWord& word, uint32_t generation) {
  word.value.store(wordOf(generation, 0), std::memory_order_relaxed);
}

inline void closeWord(CounterWord& word, bool owner_leaves) {
  word.value.store(wordOf(0, owner_leaves ? 1 : 0), std::memory_order_relaxed);
}

inline FetchResult fetchAdd(CounterWord& word, const FetchRequest& request) {
  uint64_t value = word.value.load(std::memory_order_relaxed);
  for (;;) {
    const auto generation = static_cast<uint32_t>(value >> 32);
    const auto count = static_cast<uint32_t>(value);
    if (generation != request.generation || generation == 0) {
      const bool left = generation == 0 && count != 0;
      return {left ? FetchEnd::kOwnerLeft : FetchEnd::kClosed, 0};
    }
    if (request.amount > kMaxCount - count) return {FetchEnd::kOverflow, count};
    const uint64_t sum = wordOf(generation, count + request.amount);
    if (word.value.compare_exchange_weak(value, sum, std::memory_order_relaxed)) {
      return {FetchEnd::kAdded, count};
    }
  }
}

}  // namespace hdpcomm
