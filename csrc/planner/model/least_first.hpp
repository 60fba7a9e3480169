// A queue of times from which the least one is taken and put back later, as when short sequences go
// to the least loaded rank.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

using TimedEntry = std::pair<double, int32_t>;  // (time, id); the ids differ

class LeastFirst : public std::priority_queue<TimedEntry, std::vector<TimedEntry>, std::greater<>> {
 public:
  explicit LeastFirst(std::vector<TimedEntry> entries = {})
      : priority_queue(std::greater<>(), std::move(entries)) {}

  void replaceTop(const TimedEntry& entry) {
    pop();
    push(entry);
  }
};

}  // namespace hdpcomm::planner
