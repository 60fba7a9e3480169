// When this rank last moved, for the deadlines of those that wait for it.
//
// A move is an operation that was submitted, a message (or a piece of one) that went on, a tick(),
// the begin or end of an activity, and all the time in an activity that was declared and is within
// its limit. Processor time is none: a rank that spins is not alive. An activity does not count
// while its thread waits in an operation, so a program that declares too much cannot hide that it
// hangs.
//
// A rank that waits tells others the later of its own last move and the oldest of those that it
// waits for. So a rank at the end of a chain of waits keeps all of the chain from giving up while
// it moves, and ranks that wait in a circle have no newer moves to tell: only moves make new times.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

// At most what a clock of nanoseconds can hold, and some.
inline Clock::duration durationOf(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, 1e9)));
}

// Not thread-safe: used under the lock of the world.
class Liveness {
 public:
  // To be called regularly: a `count` other than the last time is a move since then.
  void look(uint64_t count, Clock::time_point now);
  void tick(Clock::time_point now);
  // The calling thread waits in an operation from here to there.
  void beginWait() { waiting_.push_back(std::this_thread::get_id()); }
  void endWait(Clock::time_point now);
  // An activity of the calling thread, for at most this long. Returns its number.
  uint64_t begin(const std::string& what, Clock::duration limit, Clock::time_point now);
  void end(uint64_t activity, Clock::time_point now);

  // Whether an activity counts now.
  bool busy(Clock::time_point now) const;
  Clock::time_point moved(Clock::time_point now) const { return busy(now) ? now : moved_; }
  // "busy (reads data) for 12 s"; empty without an activity.
  std::string activity(Clock::time_point now) const;

 private:
  struct Activity {
    uint64_t number;
    std::string what;
    Clock::time_point begun;
    Clock::duration limit;
    std::thread::id thread;
  };
  bool counts(const Activity& activity, Clock::time_point now) const;

  std::vector<Activity> activities_;  // in order of their begin
  std::vector<std::thread::id> waiting_;
  uint64_t next_activity_ = 0;
  uint64_t count_ = 0;
  Clock::time_point moved_ = Clock::now();
};

}  // namespace hdpcomm
