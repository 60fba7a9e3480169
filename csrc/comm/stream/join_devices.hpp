// How ranks join a device world: which pairs get links, whether NCCL is needed, which board.
//
// All functions are collective over the host world of `comm`, whose transport carries the
// addresses. All ranks take the costs of rank 0, so that all choose alike.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collective/peer_reads.hpp"
#include "comm/stream/stream_engine.hpp"
#include "transport/stream/links/arena.hpp"
#include "transport/stream/nccl/nccl_mover.hpp"

namespace hdpcomm {

struct LinkJoining {
  device::ArenaConfig arena;  // the same on all ranks
  DeviceTransportCosts costs;
};

struct NcclJoining {
  // Opens NCCL; called only if the world needs it.
  std::function<std::shared_ptr<const NcclApi>()> library;
  int connect_distance = 1;  // see NcclWorld::connectAhead
  NcclCosts costs;
};

// Links between all pairs. Throws Mismatch where configurations differ, InvalidUsage where devices
// cannot reach each other.
std::shared_ptr<StreamEngine> joinLinks(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links);

// All pairs by one communicator of NCCL; the ranks may be on several hosts. Throws what NcclWorld
// does.
std::shared_ptr<StreamEngine> joinNccl(const Communicator& comm, DevicePtr device,
                                       const NcclJoining& nccl);

// Links between the pairs of a host whose devices reach each other, NCCL between all others. If all
// pairs are of one kind, the result is that of joinLinks or joinNccl. A rank's arena has room for
// the ranks of its host only.
std::shared_ptr<StreamEngine> joinPaths(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links, const NcclJoining& nccl);

}  // namespace hdpcomm
