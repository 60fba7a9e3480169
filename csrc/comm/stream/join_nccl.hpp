// How ranks join the NCCL communicator of a device world.
#pragma once

#include <memory>

#include "comm/stream/join_devices.hpp"
#include "transport/stream/links/link_map.hpp"

namespace hdpcomm {

// Broadcasts rank 0's value over the host world.
template <typename Value>
void fromRank0(const Communicator& comm, Value& value) {
  comm.collective({.in = &value, .out = &value, .count = sizeof value},
                  {.op = OpCode::kBroadcast, .root = 0}, 0, {});
}

// Joins the communicator of all ranks; it leaves out the messages between linked pairs. Collective.
std::unique_ptr<NcclMover> ncclMover(const Communicator& comm, const DevicePtr& device,
                                     const NcclJoining& nccl, const NcclCosts& costs,
                                     const LinkMap& map);

}  // namespace hdpcomm
