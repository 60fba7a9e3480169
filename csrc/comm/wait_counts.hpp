// How long the callers of a rank have waited: in all, and in the operations of communicators that
// somebody asks for.
#pragma once

#include <unordered_map>

#include "comm/host/work.hpp"

namespace hdpcomm {

// Not synchronised: under its owner's lock.
class WaitCounts {
 public:
  // `ranks`: of the operation that was waited for. Each communicator has a list of its own, so that
  // its address tells them apart.
  void add(const Ranks& ranks, Clock::duration waited) {
    total_ += waited;
    if (parts_.empty()) return;
    if (const auto found = parts_.find(ranks.get()); found != parts_.end()) {
      found->second.waited += waited;
    }
  }
  Clock::duration total() const { return total_; }
  // In operations of one communicator, since the first such question.
  Clock::duration of(const Ranks& ranks) {
    return parts_.try_emplace(ranks.get(), Part{ranks}).first->second.waited;
  }

 private:
  struct Part {
    Ranks ranks;  // so that no later list has its address
    Clock::duration waited{0};
  };
  Clock::duration total_{0};
  std::unordered_map<const std::vector<int>*, Part> parts_;
};

}  // namespace hdpcomm
