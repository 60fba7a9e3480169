// Where the ranks of a host write what they wait for, so that each can find out that some of them
// wait for each other (comm/host/deadlock.hpp). Plain shared memory: zeros are a valid start.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/call.hpp"

namespace hdpcomm {

// A value that its owner replaces and others read at any time.
template <typename T>
class Published {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);

 public:
  // How many values were written.
  uint64_t count() const { return version_.load(std::memory_order_acquire) / 2; }

  void write(const T& value) {
    uint64_t words[kWords];
    std::memcpy(words, &value, sizeof value);
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // A reader that sees one of the words sees the odd version, too.
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }

  // False if the owner wrote meanwhile.
  bool read(T& value) const {
    const uint64_t version = version_.load(std::memory_order_acquire);
    if (version % 2 != 0) return false;
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    // The words were read before the version is read again.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version_.load(std::memory_order_relaxed) != version) return false;
    std::memcpy(&value, words, sizeof value);
    return true;
  }

 private:
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);
  std::atomic<uint64_t> version_;  // odd while it is written
  std::atomic<uint64_t> words_[kWords];
};

// An operation that cannot end, or post anything more, before the awaited ranks do something.
struct WaitingWork {
  static constexpr int kRanks = 19;  // of more, only these are known
  Call call;
  uint8_t sends;  // whether this rank sends in it, and whether it receives
  uint8_t receives;
  int16_t num_awaited;
  int16_t awaited[kRanks + 1];
};

// What a blocked rank waits for. All of the works have to be stuck for the rank to be.
struct WaitRecord {
  static constexpr int kWorks = 4;
  uint64_t signature;  // changes with every message and operation of the rank
  uint64_t num_works;  // 0: the rank is not blocked
  WaitingWork works[kWorks];
};

// Ranks that a rank found waiting for each other.
struct Deadlock {
  static constexpr int kMembers = 24;
  struct Member {
    uint64_t rank;
    uint64_t signature;
  };
  uint64_t num_members;
  Member members[kMembers];
  char text[1024];
};

// One rank's place.
struct WaitPlace {
  // Health checks of the rank that have begun (each publishes its record), and that have ended.
  std::atomic<uint64_t> begun;
  std::atomic<uint64_t> ended;
  Published<WaitRecord> record;
  Published<Deadlock> deadlock;
};

}  // namespace hdpcomm
