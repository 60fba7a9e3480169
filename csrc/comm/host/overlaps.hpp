// Refuses buffers of one operation that overlap where one of them is written: what they would hold
// depends on the order in which messages arrive.
#pragma once

#include <span>

#include "comm/host/operations.hpp"

namespace hdpcomm {

// The tensors of a collective on the rank at position `rank`. Allowed are the forms in place: `out`
// is `x` where both have one block; where one has a block for each rank, the other is its part
// `rank`. Throws InvalidUsage.
void checkOverlap(const OperationRule& rule, const TensorView& x, const TensorView& out, int rank);

// The messages of an exchange: no receive may overlap another one or a send. Throws InvalidUsage.
void checkOverlaps(std::span<const Message> sends, std::span<const Message> recvs);

}  // namespace hdpcomm
