// Waits for a word of memory that another thread or process stores: yields, then sleeps on a futex
// (there may be fewer cores than waiters).
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/settings.hpp"

namespace hdpcomm::simulated {

// Sleeps until the word differs from `seen`, a wake-up comes, or the time is over.
void futexWait(const uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most);
// Wakes all sleepers on the word, of any process that maps it.
void futexWake(const uint32_t* word);

inline uint32_t loadWord(const uint32_t* word) {
  // Acquire: pairs with the release of storeWord; a reader of the value sees what came before it.
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

inline void storeWord(uint32_t* word, uint32_t value) {
  // Release: everything that this thread wrote, or has acquired, happens before the value.
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
  futexWake(word);
}

// Whether a counter, which may wrap, has reached `value`.
inline bool reached(uint32_t held, uint32_t value) {
  return static_cast<int32_t>(held - value) >= 0;
}

// Returns true once done() does, false if keep_waiting() returns false first; it is called at least
// every `slice`. `word` changes when done() may have become true.
template <typename Done, typename KeepWaiting>
bool waitFor(const uint32_t* word, Done done, KeepWaiting keep_waiting,
             std::chrono::nanoseconds slice = std::chrono::milliseconds(20)) {
  if (done()) return true;
  const auto start = std::chrono::steady_clock::now();
  const auto yields = std::chrono::duration<double, std::micro>(Settings::get().yield_us);
  while (std::chrono::steady_clock::now() - start < yields) {
    ::sched_yield();
    if (done()) return true;
  }
  for (;;) {
    const uint32_t seen = loadWord(word);
    if (done()) return true;
    if (!keep_waiting()) return done();
    futexWait(word, seen, slice);
  }
}

}  // namespace hdpcomm::simulated
