// Whether a frame is one that a rank of this version can have made: all that a peer writes is
// bounded here, before anything goes by it.
#pragma once

#include <optional>
#include <string>

#include "transport/host/framed/frame.hpp"

namespace hdpcomm::framed {

// The messages of a peer, as their pieces come in order.
class ArrivingMessages {
 public:
  // Counts a piece; what is wrong with it, if it does not follow the last one.
  std::optional<std::string> add(const Header& header);
  // Units of all pieces so far.
  uint64_t units() const { return units_; }

 private:
  Header last_;  // `offset`: where the next piece of its message begins
  uint64_t next_index_ = 0;
  uint64_t units_ = 0;
};

// What is wrong with a frame by itself, in a world of `num_ranks`.
std::optional<std::string> badFrame(const Frame& frame, int num_ranks);

}  // namespace hdpcomm::framed
