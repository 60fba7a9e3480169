#include "kernels/zigzag.hpp"

#include <string>

#include "base/error.hpp"
#include "kernels/zigzag_elem.hpp"

namespace hdpcomm::kernels {

std::vector<int64_t> zigzagBounds(const int64_t* cu_seqlens, int64_t num_sequences, int64_t ranks) {
  if (ranks < 1) {
    throwInvalidUsage("size is " + std::to_string(ranks) + "; expected at least 1 rank");
  }
  if (num_sequences < 0 || cu_seqlens[0] != 0) {
    throwInvalidUsage("cu_seqlens must begin with 0; it begins with " +
                      (num_sequences < 0 ? "nothing" : std::to_string(cu_seqlens[0])));
  }
  const int64_t pieces = 2 * ranks;
  std::vector<int64_t> bounds(static_cast<size_t>(num_sequences * (pieces + 1)));
  int64_t cursor = 0;
  int64_t* row = bounds.data();
  for (int64_t s = 0; s < num_sequences; ++s, row += pieces + 1) {
    const int64_t length = cu_seqlens[s + 1] - cu_seqlens[s];
    if (length < 0) {
      throwInvalidUsage("cu_seqlens falls from " + std::to_string(cu_seqlens[s]) + " to " +
                        std::to_string(cu_seqlens[s + 1]) + " at sequence " + std::to_string(s) +
                        "; it must be the running sum of lengths");
    }
    for (int64_t p = 0; p <= pieces; ++p) row[p] = zigzagPieceStart(length, ranks, cursor, p);
    cursor = (cursor + length % pieces) % pieces;
  }
  return bounds;
}

}  // namespace hdpcomm::kernels
