// Waiting for a word of memory that another thread or process stores: spins, yields, then sleeps
// on a futex (there may be fewer cores than waiters).
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/env.hpp"

namespace hdpcomm::sim {

// Sleeps until the word differs from `seen`, somebody wakes it, or the time is over.
void futexWait(const uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most);
// Wakes all sleepers on the word, of any process that maps it.
void futexWake(const uint32_t* word);

inline uint32_t loadWord(const uint32_t* word) {
  // Acquire: pairs with the release of storeWord; whoever sees the value sees what came before it.
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(word)).load(std::memory_order_acquire);
}

inline void storeWord(uint32_t* word, uint32_t value) {
  // Release: everything that this thread wrote, or has acquired, is before the value.
  std::atomic_ref<uint32_t>(*word).store(value, std::memory_order_release);
  futexWake(word);
}

// Has a counter that may wrap come to `value`?
inline bool reached(uint32_t held, uint32_t value) {
  return static_cast<int32_t>(held - value) >= 0;
}

// Returns true when done(), false when go_on() said so first; go_on is asked at least every
// `slice`. `word` changes when done() may have become true.
template <typename Done, typename GoOn>
bool waitFor(const uint32_t* word, Done done, GoOn go_on,
             std::chrono::nanoseconds slice = std::chrono::milliseconds(20)) {
  if (done()) return true;
  const auto start = std::chrono::steady_clock::now();
  const auto yields = std::chrono::duration<double, std::micro>(Env::get().yield_us);
  while (std::chrono::steady_clock::now() - start < yields) {
    ::sched_yield();
    if (done()) return true;
  }
  for (;;) {
    const uint32_t seen = loadWord(word);
    if (done()) return true;
    if (!go_on()) return done();
    futexWait(word, seen, slice);
  }
}

}  // namespace hdpcomm::sim
