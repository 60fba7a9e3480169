// Finds ranks of one host that wait for each other and can never go on: both receive, both send, a
// circle, roots that differ, a member that waits elsewhere.
//
// A rank is stuck if it is blocked and each of its operations awaits a stuck rank. The answer is
// certain, not a matter of time: a set counts only when each of its ranks has made a health check,
// from begin to end, since this rank first saw the set, and found itself in the same state. So each
// has looked at all messages that were sent to it, and has sent none.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

class DeadlockFinder {
 public:
  explicit DeadlockFinder(Transport& transport);

  // Around each health check of the rank. end() publishes what the rank waits for, and returns the
  // error of all of its operations if it is stuck.
  void begin();
  std::optional<Error> end(const WaitRecord& record);
  // The deadlock in which another rank has found this one, as of its last check. A member that
  // finds it first goes on at once, which ends the operations of the others, too.
  std::optional<Error> deadlockFoundByOthers();

 private:
  struct Seen {
    WaitRecord record;
    uint64_t begun = 0;  // checks of the rank, when the record was read
  };
  using Blocked = std::map<int, Seen>;

  bool look(int rank, Seen& seen) const;
  Blocked stuck(const WaitRecord& own) const;
  bool confirmed(const Blocked& now) const;
  Error publish(const Blocked& members);
  Error error(const std::string& text) const;

  Transport& transport_;
  const int rank_;
  WaitPlace* const own_;
  WaitRecord published_{};
  Blocked suspects_;            // were stuck at an earlier check
  std::vector<uint64_t> told_;  // by rank: the deadlocks of it that this rank has read
};

}  // namespace hdpcomm
