// Which words of this rank's counters are in use (transport/counters.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "transport/counters.hpp"

namespace hdpcomm {

// Used under the lock of the world.
class OwnCounters {
 public:
  // A word, and which of the counters that had it is meant.
  struct Place {
    uint32_t word = 0;
    uint32_t generation = 0;
  };
  // Opens a word at 0; nothing if all are in use.
  std::optional<Place> open(CounterWords& words);
  // Idempotent. `leaving`: this rank is about to leave its world.
  void close(CounterWords& words, const Place& place, bool leaving);

 private:
  struct Own {
    bool open = false;
    uint32_t generation = 0;
  };
  std::array<Own, kCounterWords> own_;
};

}  // namespace hdpcomm
