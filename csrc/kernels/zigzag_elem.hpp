// Where the pieces of a sequence begin under zigzag sharding.
//
// A sequence of `length` tokens over N ranks is cut in 2N pieces; rank r holds pieces r and 2N-1-r.
// length % 2N pieces are one token longer. They are dealt like cards over slots 0..2N-1, where
// slots r and N+r are the head and the tail piece of rank r. The next sequence continues where the
// dealing stopped (`cursor`), so that the ranks' totals over a whole pack differ by at most one
// token.
#pragma once

#include <cstdint>

#include "kernels/host_device.hpp"

namespace hdpcomm::kernels {

// Size of the intersection of [low, high) with the cyclic interval of `count` slots that begins at
// `cursor`, of `slots` in all (0 <= cursor < slots, 0 <= count <= slots).
HDP_HOST_DEVICE int64_t cyclicOverlap(int64_t low, int64_t high, int64_t cursor, int64_t count,
                                      int64_t slots) {
  const auto overlap = [low, high](int64_t begin, int64_t end) {
    const int64_t from = low > begin ? low : begin;
    const int64_t to = high < end ? high : end;
    return to > from ? to - from : int64_t{0};
  };
  const int64_t end = cursor + count;
  if (end <= slots) return overlap(cursor, end);
  return overlap(cursor, slots) + overlap(0, end - slots);
}

// First token of `piece` (0..2N; piece 2N gives the length). `ranks` is N.
HDP_HOST_DEVICE int64_t zigzagPieceStart(int64_t length, int64_t ranks, int64_t cursor,
                                         int64_t piece) {
  const int64_t slots = 2 * ranks;
  const int64_t longer = length % slots;
  int64_t extra = 0;  // longer pieces before this one
  if (piece <= ranks) {
    extra = cyclicOverlap(0, piece, cursor, longer, slots);
  } else {
    extra = cyclicOverlap(0, ranks, cursor, longer, slots) +
            cyclicOverlap(3 * ranks - piece, slots, cursor, longer, slots);
  }
  return piece * (length / slots) + extra;
}

}  // namespace hdpcomm::kernels
