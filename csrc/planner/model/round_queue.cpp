#include "planner/model/round_queue.hpp"

#include <algorithm>
#include <functional>

namespace hdpcomm::planner {

RoundQueue::RoundQueue(std::vector<Entry> entries) : sorted_(std::move(entries)) {
  if (std::is_sorted(sorted_.begin(), sorted_.end())) {
    std::reverse(sorted_.begin(), sorted_.end());
  } else if (!std::is_sorted(sorted_.begin(), sorted_.end(), std::greater<>())) {
    later_.swap(sorted_);  // the first round sorts them
  }
}

void RoundQueue::startRound() {
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

void RoundQueue::sortLater() {
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

}  // namespace hdpcomm::planner
