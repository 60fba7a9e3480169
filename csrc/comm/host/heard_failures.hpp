// Which failures the program has been told of: the error of an operation that nobody waits for is
// news only if no other operation has told it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/failures.hpp"

namespace hdpcomm {

// Not thread-safe: used under the lock of the world.
class HeardFailures {
 public:
  // An error of an operation that failed in this period.
  void add(const Error& error, uint64_t period) {
    if (lostRank(error) >= 0) lost_.insert(lostRank(error));
    if (has(error, period)) return;
    if (causes_.size() == kCauses) causes_.erase(causes_.begin());
    causes_.push_back({period, causeOf(error)});
  }

  bool has(const Error& error, uint64_t period) const {
    if (lostRank(error) >= 0) return lost_.contains(lostRank(error));
    return std::find(causes_.begin(), causes_.end(), Cause(period, causeOf(error))) !=
           causes_.end();
  }

  // This rank is in step with all others again: from now on the same text tells a new failure. Who
  // has died stays dead.
  void beginPeriod() { ++period_; }
  uint64_t period() const { return period_; }

 private:
  using Cause = std::pair<uint64_t, std::string>;  // in a period
  static constexpr size_t kCauses = 64;            // older ones are forgotten, and told again

  static int lostRank(const Error& error) {
    return error.kind() == ErrorKind::kPeerLost ? error.context().peer : -1;
  }
  // The same on the rank that failed first and on those that it told.
  static std::string causeOf(const Error& error) {
    const std::string cause = firstCause(error.what());
    return cause.substr(0, cause.find(kToldBy));
  }

  std::set<int> lost_;
  std::vector<Cause> causes_;
  uint64_t period_ = 0;
};

}  // namespace hdpcomm
