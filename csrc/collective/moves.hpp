// What the moves of a step mean, for every executor of schedules: on the host and on streams.
#pragma once

#include <array>

#include "collective/schedule.hpp"

namespace hdpcomm {

// Where the memory of each Buffer of a schedule begins.
using Buffers = std::array<std::byte*, 3>;

inline std::byte* addressOf(const Buffers& buffers, const Span& span) {
  return buffers[static_cast<size_t>(span.buffer)] + span.offset;
}

// Does a move by the functions of `math`: copy(to, from, bytes), reduce(to, from, count), which
// combines into `to`, and average(to, count), which divides by the size of the group.
template <typename Math>
void doMove(const Move& move, const Buffers& buffers, size_t element_bytes, const Math& math) {
  if (move.to.bytes == 0) return;
  std::byte* to = addressOf(buffers, move.to);
  const std::byte* from = addressOf(buffers, move.from);
  switch (move.kind) {
    case MoveKind::kCopy:
      if (to != from) math.copy(to, from, move.to.bytes);
      break;
    case MoveKind::kReduce:
      math.reduce(to, from, move.to.bytes / element_bytes);
      break;
    case MoveKind::kDivide:
      math.average(to, move.to.bytes / element_bytes);
      break;
  }
}

}  // namespace hdpcomm
