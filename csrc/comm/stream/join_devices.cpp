#include "comm/stream/join_devices.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/stream/host_board.hpp"
#include "transport/stream/links/link_map.hpp"
#include "transport/stream/links/link_mover.hpp"
#include "transport/stream/links/retired.hpp"
#include "transport/stream/mixed_mover.hpp"

namespace hdpcomm {
namespace {

using device::Arena;
using device::ArenaConfig;
using device::CallBoard;
using device::SharedBoard;

// The call board of ranks on several hosts: shared memory for the peers of this host, messages of
// the host world for the others.
class PathBoard final : public device::CallBoard {
 public:
  // `local`: the board of this rank's host, which numbers ranks as the world does.
  PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map);

  uint64_t key() const override { return local_->key(); }
  void enter(int own) override { local_->enter(own); }
  void opened() override { local_->opened(); }
  void fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) override;
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& valid_posts) override;
  uint64_t validPosts(int src, int own) override { return boardOf(src).validPosts(src, own); }
  device::BoardState state(int rank) override { return boardOf(rank).state(rank); }
  Error lastError(int rank) override { return boardOf(rank).lastError(rank); }
  bool processAlive(int rank) override { return boardOf(rank).processAlive(rank); }
  bool post(int own, int dst, const device::CallEntry& entry) override {
    return boardOf(dst).post(own, dst, entry);
  }
  void expect(int src, int own, const device::CallEntry& entry) override {
    boardOf(src).expect(src, own, entry);
  }
  std::optional<device::CallEntry> take(int src, int own) override {
    return boardOf(src).take(src, own);
  }
  void accept(int src, int own) override { boardOf(src).accept(src, own); }
  uint64_t accepted(int own, int dst) override { return boardOf(dst).accepted(own, dst); }

 private:
  CallBoard& boardOf(int rank) {
    if (here_[static_cast<size_t>(rank)]) return *local_;
    return far_;
  }

  const std::shared_ptr<device::SharedBoard> local_;
  HostBoard far_;
  std::vector<bool> here_;
};

PathBoard::PathBoard(World& world, std::shared_ptr<device::SharedBoard> local, const LinkMap& map)
    : local_(std::move(local)), far_(world) {
  for (int rank = 0; rank < map.size(); ++rank) here_.push_back(map.sameHost(rank, world.rank()));
}

// The host's own board first: its peers read the error there before the host world ends.
void PathBoard::fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) {
  local_->fail(own, error, valid_posts);
  far_.fail(own, error, valid_posts);
}

void PathBoard::leave(int own, const std::string& reason,
                      const std::vector<uint64_t>& valid_posts) {
  local_->leave(own, reason, valid_posts);
  far_.leave(own, reason, valid_posts);
}

// Broadcasts rank 0's value over the host world.
template <typename Value>
void fromRank0(const Communicator& comm, Value& value) {
  comm.collective({.in = &value, .out = &value, .count = sizeof value},
                  {.op = OpCode::kBroadcast, .root = 0}, 0, {});
}

constexpr auto kCheckInterval = std::chrono::milliseconds(100);

// Throws when a rank that has to join too is gone.
NcclWorld::WaitCheck checkRanks(World& world) {
  return [&world, next = Clock::now() + kCheckInterval]() mutable {
    if (Clock::now() < next) return;
    for (int rank = 0; rank < world.size(); ++rank) {
      if (const std::optional<Error> loss = world.departure(rank)) throw *loss;
    }
    next = Clock::now() + kCheckInterval;
  };
}

// Joins the communicator of all ranks; it leaves out the messages between linked pairs. Collective.
std::unique_ptr<NcclMover> ncclMover(const Communicator& comm, const DevicePtr& device,
                                     const NcclJoining& nccl, const NcclCosts& costs,
                                     const LinkMap& map) {
  const std::shared_ptr<const NcclApi> api = nccl.library();
  NcclUniqueId id{};
  if (comm.rank() == 0) ncclCheck(*api, api->getUniqueId(&id), "ncclGetUniqueId", nullptr, 0);
  fromRank0(comm, id);
  World& host = comm.world();
  const NcclWorld::WaitCheck check = checkRanks(host);
  const DeviceMemory bytes(device, device->allocate(2));  // that connectAhead() exchanges
  auto world = std::make_unique<NcclWorld>(api, id, comm.rank(), comm.size(), host.timeout(),
                                           host.schedules().nodesOf(comm.ranks()), check);
  std::vector<bool> linked;
  for (int rank = 0; rank < comm.size(); ++rank) linked.push_back(map.linked(comm.rank(), rank));
  if (!map.none()) world->leaveOut(std::move(linked));
  const OwnedStream stream(device, device->createStream());
  device->fill(bytes.get(), 0, 2, stream.get());
  world->connectAhead(nccl.connect_distance, static_cast<std::byte*>(bytes.get()),
                      ncclStreamOf(stream.get()), check);
  device->synchronize(stream.get(), host.timeout(), check);
  return std::make_unique<NcclMover>(device, std::move(world), costs);
}

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
