#include "comm/stream/join_devices.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <thread>

#include "comm/stream/join_nccl.hpp"
#include "comm/stream/path_board.hpp"
#include "transport/stream/links/link_mover.hpp"
#include "transport/stream/links/retired.hpp"
#include "transport/stream/mixed_mover.hpp"

namespace hdpcomm {
namespace {

using device::Arena;
using device::ArenaConfig;
using device::CallBoard;
using device::SharedBoard;

// What a rank that joins with links sends to every other rank.
struct Introduction {
  MemoryHandle arena;  // zeros: the rank has none
  ArenaConfig config;
  int32_t ordinal;
  int32_t sim;
  int32_t together;   // kernels of processes that share the device run at the same time
  char identity[32];  // of the device on its host
};

// Whether two of these ranks share a device by turns, in which a kernel that waits for the other
// would use up its own.
bool takeTurns(const std::vector<Introduction>& everyone, const std::vector<int>& mates) {
  std::set<std::string> seen;
  for (const int rank : mates) {
    const Introduction& each = everyone[static_cast<size_t>(rank)];
    const std::string identity = readText(each.identity, sizeof each.identity);
    if (identity.empty()) continue;
    if (!seen.insert(identity).second && each.together == 0) return true;
  }
  return false;
}

// All-gathers `bytes` bytes of every rank, by rank.
void gather(const Communicator& comm, const void* own, void* all, size_t bytes) {
  comm.collective({.in = own, .out = all, .count = bytes}, {.op = OpCode::kAllGather}, 0, {});
}

void checkIntroductions(const Communicator& comm, const std::vector<Introduction>& everyone) {
  const Introduction& own = everyone[static_cast<size_t>(comm.rank())];
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Introduction& other = everyone[static_cast<size_t>(peer)];
    if (other.sim == own.sim && other.config == own.config) continue;
    throw Error(
        ErrorKind::kMismatch,
        "ranks " + std::to_string(comm.rank()) + " and " + std::to_string(peer) +
            " joined with different transports or HDPCOMM_DEVICE_* settings: start all "
            "ranks with the same ones",
        {.rank = comm.rank(), .peer = peer, .op = "init", .ranks = comm.ranks(), .seq = -1});
  }
}

// What `open` returns, which opens memory of `peer`. If that fails because the peer has died or
// given up, this is the error: its memory goes with its process, a moment before that is known to
// have ended.
template <typename Open>
auto openMemoryOf(const Communicator& comm, int peer, Open open) {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  try {
    return open();
  } catch (const Error&) {
    const auto until = Clock::now() + kPatience;
    for (;;) {
      if (const auto gone = comm.world().departure(comm.ranks()[static_cast<size_t>(peer)])) {
        throw Error(
            gone->kind(), std::string(gone->what()) + " while the ranks joined their devices",
            {.rank = comm.rank(), .peer = peer, .op = "init", .ranks = comm.ranks(), .seq = -1});
      }
      if (Clock::now() >= until) throw;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

void requireAccess(const Communicator& comm, const DeviceApi& device, int peer, int ordinal) {
  if (device.canAccessPeer(ordinal)) return;
  throw Error(ErrorKind::kInvalidUsage,
              "device " + std::to_string(device.ordinal()) + " of rank " +
                  std::to_string(comm.rank()) + " cannot read the memory of device " +
                  std::to_string(ordinal) + " of rank " + std::to_string(peer) +
                  ": this transport needs peer access between all GPUs; take transport='auto', "
                  "which uses NCCL for those that have none",
              {.rank = comm.rank(), .peer = peer, .op = "init", .ranks = comm.ranks(), .seq = -1});
}

// Maps the memory of another rank if that is possible. A driver may refuse access that it had
// reported as possible, between containers for instance.
bool tryImport(Arena& arena, const DeviceApi& device, int place, const Introduction& other) {
  if (!device.canAccessPeer(other.ordinal)) return false;
  try {
    arena.importPeer(place, other.arena);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Opens this rank's arena, maps those of its hostmates, and enters in `map` which pairs are linked.
// `strict`: throws where a pair cannot be linked. Otherwise returns null for a rank without links.
std::unique_ptr<Arena> openArena(const Communicator& comm, const DevicePtr& device,
                                 const ArenaConfig& given, LinkMap& map, bool strict) {
  StreamEngine::freeUndrained();
  device::freeRetiredArenas();
  const int own = comm.rank();
  size_t most_ranks = 0;  // of a host
  for (int rank = 0; rank < comm.size(); ++rank) {
    most_ranks = std::max(most_ranks, map.hostmates(rank).size());
  }
  const ArenaConfig config = device::withSlotBytes(given, static_cast<int>(most_ranks));
  const std::vector<int>& mates = map.hostmates(own);
  std::unique_ptr<Arena> arena;
  Introduction introduction{.arena = {},
                            .config = config,
                            .ordinal = device->ordinal(),
                            .sim = device->isSim(),
                            .together = device->runsProcessesTogether(),
                            .identity = {}};
  std::snprintf(introduction.identity, sizeof introduction.identity, "%s",
                device->identity().c_str());
  if (strict || mates.size() > 1 || comm.size() == 1) {
    arena =
        std::make_unique<Arena>(device, config, static_cast<int>(mates.size()), map.placeOf(own));
    introduction.arena = arena->exportOwn();
  }
  std::vector<Introduction> everyone(static_cast<size_t>(comm.size()));
  gather(comm, &introduction, everyone.data(), sizeof introduction);
  checkIntroductions(comm, everyone);
  if (arena != nullptr && takeTurns(everyone, mates)) arena->withoutSmall();
  std::vector<uint8_t> reached(map.maskBytes());
  for (const int peer : mates) {
    if (peer == own) continue;
    const Introduction& other = everyone[static_cast<size_t>(peer)];
    if (strict) {
      requireAccess(comm, *device, peer, other.ordinal);
      openMemoryOf(comm, peer, [&] { arena->importPeer(map.placeOf(peer), other.arena); });
    } else if (!tryImport(*arena, *device, map.placeOf(peer), other)) {
      continue;
    }
    LinkMap::setReached(reached, map.placeOf(peer));
  }
  std::vector<uint8_t> masks(map.maskBytes() * static_cast<size_t>(comm.size()));
  gather(comm, reached.data(), masks.data(), reached.size());
  map.setMasks(std::move(masks));
  if (!map.linked(own, own)) arena.reset();
  return arena;
}

// Opens the host's board, which has a place for every rank of the world; pages of ranks elsewhere
// are never touched. The last call before StreamEngine::start(), whose barrier says that all have
// opened it: a rank that failed in between would have closed it.
std::shared_ptr<SharedBoard> shareBoard(const Communicator& comm, const LinkMap& map) {
  struct Address {
    char text[64] = {};
  };
  const int host = map.hostmates(comm.rank()).front();
  Address own;
  std::shared_ptr<SharedBoard> board;
  if (comm.rank() == host) {
    board = SharedBoard::create(comm.size());
    std::snprintf(own.text, sizeof own.text, "%s", board->address().c_str());
  }
  std::vector<Address> all(static_cast<size_t>(comm.size()));
  gather(comm, &own, all.data(), sizeof own);
  if (board == nullptr) {
    board = openMemoryOf(comm, host, [&] {
      return SharedBoard::open(readText(all[static_cast<size_t>(host)].text, sizeof Address::text),
                               comm.size());
    });
  }
  return board;
}

std::shared_ptr<CallBoard> boardOf(const Communicator& comm,
                                   const std::shared_ptr<SharedBoard>& local, const LinkMap& map) {
  const bool one_host = map.hostmates(comm.rank()).size() == static_cast<size_t>(comm.size());
  if (one_host) return local;
  return std::make_shared<PathBoard>(comm.world(), local, map);
}

std::unique_ptr<LinkMover> linkMover(const Communicator& comm, const DevicePtr& device,
                                     std::unique_ptr<Arena> arena,
                                     const std::shared_ptr<SharedBoard>& board,
                                     const DeviceTransportCosts& costs, const LinkMap& map) {
  std::vector<int> places;
  for (int rank = 0; rank < comm.size(); ++rank) {
    places.push_back(map.linked(comm.rank(), rank) ? map.placeOf(rank) : -1);
  }
  return std::make_unique<LinkMover>(device, std::move(arena), board, costs, std::move(places),
                                     comm.rank());
}

DeviceTransportCosts linkCosts(const Communicator& comm, const LinkJoining& links) {
  DeviceTransportCosts costs = links.costs;
  costs.window_bytes = static_cast<double>(links.arena.window_bytes);
  fromRank0(comm, costs);
  return costs;
}

}  // namespace

std::shared_ptr<StreamEngine> joinLinks(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links) {
  LinkMap map(comm.size(), {});
  std::unique_ptr<Arena> arena = openArena(comm, device, links.arena, map, true);
  const DeviceTransportCosts costs = linkCosts(comm, links);
  const std::shared_ptr<SharedBoard> board = shareBoard(comm, map);
  auto mover = linkMover(comm, device, std::move(arena), board, costs, map);
  return StreamEngine::start(comm, std::move(device), board, std::move(mover));
}

std::shared_ptr<StreamEngine> joinNccl(const Communicator& comm, DevicePtr device,
                                       const NcclJoining& nccl) {
  const LinkMap map(comm.size(), comm.world().schedules().nodesOf(comm.ranks()));
  NcclCosts costs = nccl.costs;
  fromRank0(comm, costs);
  auto mover = ncclMover(comm, device, nccl, costs, map);
  std::shared_ptr<CallBoard> board = boardOf(comm, shareBoard(comm, map), map);
  return StreamEngine::start(comm, std::move(device), std::move(board), std::move(mover));
}

std::shared_ptr<StreamEngine> joinPaths(const Communicator& comm, DevicePtr device,
                                        const LinkJoining& links, const NcclJoining& nccl) {
  auto map = std::make_shared<LinkMap>(comm.size(), comm.world().schedules().nodesOf(comm.ranks()));
  std::unique_ptr<Arena> arena = openArena(comm, device, links.arena, *map, false);
  const DeviceTransportCosts link_costs = linkCosts(comm, links);
  NcclCosts nccl_costs = nccl.costs;
  fromRank0(comm, nccl_costs);
  std::unique_ptr<NcclMover> others;
  if (!map->complete()) others = ncclMover(comm, device, nccl, nccl_costs, *map);
  const std::shared_ptr<SharedBoard> local = shareBoard(comm, *map);
  std::unique_ptr<LinkMover> linked;
  if (arena != nullptr) {
    linked = linkMover(comm, device, std::move(arena), local, link_costs, *map);
  }
  std::unique_ptr<StreamMover> mover;
  if (others == nullptr) {
    mover = std::move(linked);
  } else if (map->none()) {
    mover = std::move(others);
  } else {
    mover = std::make_unique<MixedMover>(device, map, std::move(linked), std::move(others),
                                         link_costs.messages, nccl_costs, comm.rank());
  }
  std::shared_ptr<CallBoard> board = boardOf(comm, local, *map);
  return StreamEngine::start(comm, std::move(device), std::move(board), std::move(mover));
}

}  // namespace hdpcomm
