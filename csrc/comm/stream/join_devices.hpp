// How ranks join a device world: which pairs get links, whether NCCL is needed, which board.
//
// All are collective over the host world of `comm`, whose transport carries the addresses; the
// costs of rank 0 are everybody's, so that all choose alike.
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
  DeviceCosts costs;
};

struct NcclJoining {
  // Opens NCCL; called where it is needed.
  std::function<std::shared_ptr<const NcclApi>()> library;
  int connect_distance = 1;  // see NcclWorld::connectAhead
  NcclCosts costs;
  // Whether messages by NCCL with a landing place are put there; rank 0's choice counts. kMeasure:
  // if that is faster around the ring of all ranks than sends.
  enum class OneSided : uint8_t { kOff, kOn, kMeasure };
  OneSided one_sided = OneSided::kOff;
  size_t landing_bytes = 0;  // of the landing zone then
  std::string no_puts = {};  // what else stands against it on this rank; empty: nothing
};

// Links between all pairs. Throws Mismatch where configurations differ, InvalidUsage where devices
// cannot reach each other.
std::shared_ptr<StreamEngine> joinLinks(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links);

// All pairs by one communicator of NCCL; the ranks may be on several hosts. Throws what NcclWorld
// does.
std::shared_ptr<StreamEngine> joinNccl(const Communicator& comm, DevicePtr device,
                                       const NcclJoining& nccl);

// Links between the pairs of a host whose devices reach each other, NCCL between all others; if
// there are none of a kind, it is joinLinks or joinNccl. A rank's arena is for its host's ranks.
std::shared_ptr<StreamEngine> joinPaths(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links, const NcclJoining& nccl);

}  // namespace hdpcomm
