// A FIFO that reuses its memory: no allocation once it has grown to the depth in use (std::deque
// allocates as it moves).
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

namespace hdpcomm {

template <typename T>
class RingQueue {
 public:
  bool empty() const noexcept { return size_ == 0; }
  size_t size() const noexcept { return size_; }
  T& front() noexcept { return items_[head_]; }
  T& back() noexcept { return (*this)[size_ - 1]; }
  T& operator[](size_t i) noexcept { return items_[(head_ + i) & (items_.size() - 1)]; }

  void push(const T& item) { next() = item; }
  void push(T&& item) { next() = std::move(item); }
  void pop() noexcept {
    if constexpr (!std::is_trivially_destructible_v<T>)
      items_[head_] = T{};  // lets go of what it holds
    head_ = (head_ + 1) & (items_.size() - 1);
    --size_;
  }
  void clear() noexcept {
    while (!empty()) pop();
  }
  template <typename Holds>
  bool any(Holds holds) {
    for (size_t i = 0; i < size_; ++i) {
      if (holds((*this)[i])) return true;
    }
    return false;
  }
  // Keeps the items for which keep(item) holds, in order.
  template <typename Keep>
  void filter(Keep keep) {
    for (size_t i = size_; i > 0; --i) {
      T item = std::move(front());
      pop();
      if (keep(item)) push(std::move(item));
    }
  }

 private:
  T& next() {
    if (size_ == items_.size()) grow();
    return items_[(head_ + size_++) & (items_.size() - 1)];
  }
  void grow() {
    std::vector<T> larger(items_.empty() ? 4 : items_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    items_ = std::move(larger);
    head_ = 0;
  }

  std::vector<T> items_;  // size is a power of two
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace hdpcomm
