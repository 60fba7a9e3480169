// A priority queue whose first entry is replaced by a later one, again and again, as when short
// sequences go to the least loaded rank. What is replaced waits unsorted until the first of it is
// next: then all of it is sorted at once, which is much quicker for many ranks than a heap of them.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

class RoundQueue {
 public:
  using Entry = std::pair<double, int32_t>;  // (time, id); the ids differ

  explicit RoundQueue(std::vector<Entry> entries);

  bool empty() const noexcept { return sorted_.empty() && later_.empty(); }

  // The least entry.
  const Entry& top() {
    if (sorted_.empty() || (!later_.empty() && first_later_ < sorted_.back())) startRound();
    return sorted_.back();
  }

  // Replaces the least entry, which top() gave, by one that is not less.
  void replaceTop(const Entry& entry) {
    sorted_.pop_back();
    if (later_.empty() || entry < first_later_) first_later_ = entry;
    later_.push_back(entry);
  }

  // Takes the least entry away, which top() gave.
  void pop() noexcept { sorted_.pop_back(); }

  // Puts back what pop() took, the last one first, before top() is asked again.
  void putBack(const Entry& entry) { sorted_.push_back(entry); }

 private:
  // Merges what was replaced into the rest.
  void startRound();

  // Sorts by buckets of equal width, as many as there are entries.
  void sortLater();

  std::vector<Entry> sorted_;  // the least one last
  std::vector<Entry> later_;   // in any order
  Entry first_later_;          // the least of these
  std::vector<Entry> passed_, scattered_;
  std::vector<uint32_t> ends_;
};

}  // namespace hdpcomm::planner
