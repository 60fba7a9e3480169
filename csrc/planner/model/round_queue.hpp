// A priority queue whose first entry is replaced by a later one, again and again, as when short
// sequences go to the least loaded rank. What is replaced waits unsorted until the first of it is
// next: then all of it is sorted at once, which is much quicker for many ranks than a heap of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

class RoundQueue {
 public:
  using Entry = std::pair<double, int32_t>;  // (time, id); the ids differ

  explicit RoundQueue(std::vector<Entry> entries) : sorted_(std::move(entries)) {
    if (std::is_sorted(sorted_.begin(), sorted_.end())) {
      std::reverse(sorted_.begin(), sorted_.end());
    } else if (!std::is_sorted(sorted_.begin(), sorted_.end(), std::greater<>())) {
      later_.swap(sorted_);  // the first round sorts them
    }
  }

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
  void startRound() {
    sortLater();
    passed_.clear();
    while (!sorted_.empty() && sorted_.back() < later_.back()) {
      passed_.push_back(sorted_.back());
      sorted_.pop_back();
    }
    while (!passed_.empty() && !later_.empty()) {
      auto& source = passed_.back() < later_.back() ? later_ : passed_;
      sorted_.push_back(source.back());
      source.pop_back();
    }
    auto& rest = passed_.empty() ? later_ : passed_;
    sorted_.insert(sorted_.end(), rest.rbegin(), rest.rend());
    later_.clear();
  }

  // Sorts by buckets of equal width, as many as there are entries.
  void sortLater() {
    constexpr size_t kFew = 64;
    if (std::is_sorted(later_.begin(), later_.end())) return;
    const auto [least, greatest] = std::minmax_element(later_.begin(), later_.end());
    const double begin = least->first;
    const double scale = static_cast<double>(later_.size() - 1) / (greatest->first - begin);
    if (later_.size() < kFew || !(scale < 1e300)) {
      std::sort(later_.begin(), later_.end());
      return;
    }
    const auto bucket = [&](const Entry& entry) {
      return static_cast<size_t>((entry.first - begin) * scale);
    };
    ends_.assign(later_.size() + 1, 0);
    for (const Entry& entry : later_) ++ends_[bucket(entry) + 1];
    for (size_t i = 1; i < ends_.size(); ++i) ends_[i] += ends_[i - 1];
    scattered_.resize(later_.size());
    for (const Entry& entry : later_) scattered_[ends_[bucket(entry)]++] = entry;
    later_.swap(scattered_);
    uint32_t start = 0;
    for (const uint32_t end : ends_) {
      if (end > start + 1) std::sort(later_.begin() + start, later_.begin() + end);
      start = end;
    }
  }

  std::vector<Entry> sorted_;  // the least one last
  std::vector<Entry> later_;   // in any order
  Entry first_later_;          // the least of these
  std::vector<Entry> passed_, scattered_;
  std::vector<uint32_t> ends_;
};

}  // namespace hdpcomm::planner
