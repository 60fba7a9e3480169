// What a rank tells those that wait for it: when it last moved, and who keeps it from moving
// (comm/host/liveness.hpp). All of it comes from another process: bounded where it is read.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/wait_board.hpp"

namespace hdpcomm {

inline constexpr size_t kPulseText = 120;
// No rank waits longer, so an older move is as good as this one; also keeps sums of times in range.
inline constexpr int64_t kOldestMoveMs = 1LL << 40;

struct Pulse {
  using Time = std::chrono::steady_clock::time_point;

  Time moved;  // of the rank; while it waits, of the rank at the end of its waits if that is later
  Time culprit_moved;  // the last move of the rank at the end of its waits
  int culprit = -1;    // that rank; the rank itself, while it waits for nobody
  std::string doing;   // what the culprit did last, or what it is busy with
};

// The form that ranks of one host share: the clock is the host's.
struct PulseRecord {
  int64_t moved_ns;
  int64_t culprit_moved_ns;
  int64_t culprit;
  char doing[kPulseText];
};

struct PulsePlace {
  Published<PulseRecord> record;
};

// At most kPulseText characters, each of them printable ASCII.
std::string pulseText(const char* text, size_t length);
// A time that is neither later than now nor too old.
Pulse::Time pulseTime(Pulse::Time time, Pulse::Time now);

PulseRecord recordOf(const Pulse& pulse);
// With all values in their range, in a world of `num_ranks`; `rank` wrote the record.
Pulse pulseOf(const PulseRecord& record, int rank, int num_ranks, Pulse::Time now);

}  // namespace hdpcomm
