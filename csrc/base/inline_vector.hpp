// A vector of plain values that keeps the first N in itself: most operations have a few messages,
// and a memory allocation costs as much as sending one.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace hdpcomm {

template <typename T, size_t N>
class InlineVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  InlineVector() noexcept {}
  InlineVector(const InlineVector&) = delete;
  InlineVector& operator=(const InlineVector&) = delete;

  size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* begin() noexcept { return data(); }
  T* end() noexcept { return data() + size_; }
  const T* begin() const noexcept { return data(); }
  const T* end() const noexcept { return data() + size_; }
  T& operator[](size_t i) noexcept { return data()[i]; }
  const T& operator[](size_t i) const noexcept { return data()[i]; }

  void reserve(size_t capacity) {
    if (capacity > capacity_) grow(capacity);
  }
  T& push_back(const T& item) { return emplace_back(item); }
  template <typename... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == capacity_) [[unlikely]]
      grow(capacity_ * 2);
    return *new (data() + size_++) T{std::forward<Args>(args)...};
  }

 private:
  [[gnu::noinline, gnu::cold]] void grow(size_t capacity) {
    auto larger = std::make_unique_for_overwrite<std::byte[]>(capacity * sizeof(T));
    std::memcpy(larger.get(), data(), size_ * sizeof(T));
    heap_ = std::move(larger);
    capacity_ = capacity;
  }
  T* data() noexcept { return reinterpret_cast<T*>(heap_ ? heap_.get() : inline_); }
  const T* data() const noexcept {
    return reinterpret_cast<const T*>(heap_ ? heap_.get() : inline_);
  }

  size_t size_ = 0;
  size_t capacity_ = N;
  std::unique_ptr<std::byte[]> heap_;
  alignas(T) std::byte inline_[N * sizeof(T)];
};

}  // namespace hdpcomm
