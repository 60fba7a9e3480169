// Proves schedules by executing them symbolically, in the least friendly way that the rules allow.
//
// A value is (logical element, set of ranks that contributed). Sends block until the receiver takes
// them and are read only then; matching is in order for a pair of ranks, in random order between
// pairs. Found are: a rank that ends without exactly the contributions it must have (each exactly
// once), a read of what has not arrived, an input that is written, a span that changes while it is
// being sent, sizes that do not fit, messages out of order, and waits in a circle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/schedule.hpp"

namespace hdpcomm::testing {

struct CheckedOperation {
  ScheduleRequest request;  // rank is ignored; group_size is ranks.size()
  std::vector<int> ranks;   // global
  bool in_place = false;
};

// A mistake to plant in a schedule, so that tests can show that the checker finds it.
enum class Fault : uint8_t {
  kNone,
  kDropSend,
  kDropRecv,
  kCopyForReduce,
  kShiftRecv,
  kBlockingSends,
  kSwapSteps,
};

// Runs the operations on `num_ranks` ranks, each rank its own in the order of the list. Returns an
// empty string, or what is wrong. `seed` varies the order in which pairs of ranks proceed. Groups
// have at most 128 ranks. `fault` is planted in the last rank of the first operation; throws
// std::invalid_argument when its schedule has no place for it.
std::string checkOperations(int num_ranks, const std::vector<CheckedOperation>& operations,
                            uint64_t seed, Fault fault = Fault::kNone);

}  // namespace hdpcomm::testing
