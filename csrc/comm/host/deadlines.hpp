// How long the operations of a rank may wait, from the moves of the ranks that they wait for
// (liveness.hpp), and what this rank tells the others for theirs.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "comm/host/liveness.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

// Used under the lock of the world, but for goByLiveness(), tells() and their counts.
class Deadlines {
 public:
  Deadlines(Transport& transport, double timeout_s, double longest_wait_s)
      : transport_(transport), timeout_s_(timeout_s), longest_wait_s_(longest_wait_s) {}

  // The ranks that a part's operations wait for now, its last operation, and a count of moves.
  struct PartMoves {
    std::vector<int> awaited;
    std::string last;
    uint64_t count = 0;
  };
  // Who keeps an operation that went by liveness from going on, for its error.
  struct Stuck {
    int rank;
    std::string text;
  };
  // Both by one look at the ranks, which may move at any time.
  struct Allowed {
    Clock::time_point until;
    std::optional<Stuck> stuck;  // from then on; none if the awaited ranks tell nothing
  };

  Liveness& moves() noexcept { return moves_; }
  // Counts the callers that want operations to go by liveness.
  void goByLiveness(bool on) { by_liveness_ += on ? 1 : -1; }
  bool byLiveness() const noexcept { return by_liveness_.load(std::memory_order_relaxed) > 0; }
  // True the first time: from then on publish() is to be called regularly. One that tells nothing
  // is given the plain timeout.
  bool beginTelling() noexcept { return !tells_.exchange(true); }
  bool tells() const noexcept { return tells_.load(std::memory_order_relaxed); }

  void reportPartMoves(PartMoves moves);
  void endPartWait();

  // Tells the others when this rank last moved, and for whom it waits.
  //   count: of its operations, messages and fetches; last: its last operation;
  //   awaited: the ranks that its operations wait for, beside those of its part.
  void publish(uint64_t count, const std::string& last, std::vector<int> awaited,
               Clock::time_point now);
  // Until when an operation that began at `start` may wait for these ranks, as they move.
  Allowed allowed(const std::vector<int>& awaited, Clock::time_point start, const std::string& last,
                  Clock::time_point now);

 private:
  Pulse ownPulse(const std::string& last, Clock::time_point now) const;
  std::optional<Pulse> slowest(const std::vector<int>& ranks, const std::string& last,
                               Clock::time_point now);

  Transport& transport_;
  const double timeout_s_;
  const double longest_wait_s_;
  Liveness moves_;
  PartMoves part_;
  Clock::time_point part_moved_;  // when their count last changed
  std::atomic<int> by_liveness_{0};
  std::atomic<bool> tells_{false};
};

}  // namespace hdpcomm
