// Which rank is free first, where ranks take one micro-batch after the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

// When ranks are free; those free at the same time by rising rank. A heap whose first entry is
// moved in one pass: a priority_queue takes two, one to pop it and one to push it again. All of it
// is in the header, since searches spend their time here.
class FreeRanks {
 public:
  void clear() noexcept { entries_.clear(); }
  void add(double when, int32_t rank) { entries_.push_back({when, rank}); }
  // After the last add().
  void arrange() { std::make_heap(entries_.begin(), entries_.end(), std::greater<>()); }

  double when() const noexcept { return entries_.front().first; }
  int32_t rank() const noexcept { return entries_.front().second; }

  // The rank that is free first is so at `when`, which is later.
  void delayFirst(double when) noexcept {
    const std::pair<double, int32_t> moved{when, rank()};
    const size_t size = entries_.size();
    size_t at = 0;
    for (size_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && entries_[child + 1] < entries_[child]) ++child;
      if (moved < entries_[child]) break;
      entries_[at] = entries_[child];
      at = child;
    }
    entries_[at] = moved;
  }

 private:
  std::vector<std::pair<double, int32_t>> entries_;
};

}  // namespace hdpcomm::planner
