// The part of joining a device world that NCCL has.
#pragma once

#include <memory>

#include "comm/stream/join_devices.hpp"
#include "transport/stream/links/link_map.hpp"

namespace hdpcomm {

// Rank 0's value, on all ranks of the host world.
template <typename Value>
void fromRank0(const Communicator& comm, Value& value) {
  comm.collective({.in = &value, .out = &value, .count = sizeof value},
                  {.op = OpCode::kBroadcast, .root = 0}, 0, {});
}

// The communicator of all ranks, whose messages between linked pairs go another way. Collective.
std::unique_ptr<NcclMover> ncclMover(const Communicator& comm, const DevicePtr& device,
                                     const NcclJoining& nccl, const NcclCosts& costs,
                                     const LinkMap& map);

}  // namespace hdpcomm
