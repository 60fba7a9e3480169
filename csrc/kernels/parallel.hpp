// Splits independent rows over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace hdpcomm::kernels {

// Below this many elements a thread costs more than it saves (about 30 us to start one).
inline constexpr int64_t kElementsPerThread = 1 << 18;

// Calls `range(begin, end)` for ranges that cover [0, rows), on up to num_threads threads, one for
// each kElementsPerThread of `elements`. `range` must not throw.
template <typename Range>
void forRows(int64_t rows, int64_t elements, int num_threads, Range&& range) {
  const int64_t threads =
      std::clamp<int64_t>(elements / kElementsPerThread, 1, std::max<int64_t>(num_threads, 1));
  if (threads == 1) return range(int64_t{0}, rows);
  const auto boundary = [&](int64_t i) { return rows * i / threads; };
  std::vector<std::jthread> workers;
  workers.reserve(static_cast<size_t>(threads - 1));
  for (int64_t i = 1; i < threads; ++i) {
    workers.emplace_back([&range, from = boundary(i), to = boundary(i + 1)] { range(from, to); });
  }
  range(int64_t{0}, boundary(1));
}

}  // namespace hdpcomm::kernels
