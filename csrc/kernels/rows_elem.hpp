// Segmented row copies: which source row a destination row comes from.
#pragma once

#include <cstdint>

#include "kernels/host_device.hpp"

namespace hdpcomm::kernels {

// `rows` consecutive rows go from row `src` to row `dst`; `first` is the number of rows in the
// segments before this one, so that a thread finds its segment by binary search. `position` is the
// position of the first row in its sequence (for RoPE).
struct RowSegment {
  int64_t dst;
  int64_t src;
  int64_t rows;
  int64_t first;
  int64_t position;
};

// The segment that holds the index-th row of all segments (0 <= index < total rows).
HDP_HOST_DEVICE int64_t findSegment(const RowSegment* segments, int64_t count, int64_t index) {
  int64_t low = 0;
  int64_t high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (segments[middle].first <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace hdpcomm::kernels
