#include "comm/stream/join_nccl.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>

namespace hdpcomm {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(100);
constexpr double kMiB = 1 << 20;

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

// A world that is being joined, and what the joining calls need.
struct Joining {
  const Communicator& comm;
  DeviceApi& device;
  NcclWorld& world;
  Stream stream;
  NcclWorld::WaitCheck check;

  NcclStream raw() const { return ncclStreamOf(stream); }
  void synchronize() const { device.synchronize(stream, comm.world().timeout(), check); }
};

// The largest values of all ranks.
template <size_t kCount>
std::array<double, kCount> largest(const Communicator& comm, std::array<double, kCount> values) {
  comm.collective(
      {.in = values.data(), .out = values.data(), .count = kCount, .dtype = DType::kFloat64},
      {.op = OpCode::kAllReduce, .redop = RedOp::kMax}, 0, {});
  return values;
}

// Times messages around the ring of all ranks, as puts or as sends, over the pairs without a link.
// Returns the seconds of the fastest round.
double ringSeconds(const Joining& join, size_t bytes, bool puts) {
  constexpr int kRounds = 5;
  constexpr int kMessages = 4;
  const int size = join.world.size();
  const int next = (join.world.rank() + 1) % size;
  const int last = (join.world.rank() + size - 1) % size;
  std::byte* const zone = join.world.window();
  const auto place = puts ? 0 : NcclWorld::kNoPlace;
  std::vector<NcclWorld::Message> to;
  std::vector<NcclWorld::Message> from;
  if (!join.world.leavesOut(next)) to.push_back({zone + bytes, bytes, next, place});
  if (!join.world.leavesOut(last)) from.push_back({zone, bytes, last, place});
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round <= kRounds; ++round) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kMessages; ++i) join.world.exchange(to, from, join.raw(), join.check);
    join.synchronize();
    const std::chrono::duration<double> taken = Clock::now() - start;
    if (round > 0) best = std::min(best, taken.count());  // the first one may connect
  }
  return best;
}

// Opens the window for puts, if the ranks can put, and, with kMeasure, if puts are faster. Returns
// the bytes of its landing zone, behind which the window has as many again; 0: there is no window.
size_t openLanding(const Joining& join, const NcclJoining& nccl) {
  struct {
    uint64_t bytes;
    NcclJoining::OneSided mode;
  } choice{nccl.landing_bytes, nccl.one_sided};
  fromRank0(join.comm, choice);
  if (choice.mode == NcclJoining::OneSided::kOff || choice.bytes == 0 || join.world.size() == 1) {
    return 0;
  }
  const std::string missing = nccl.no_puts.empty() ? join.world.putsMissing() : nccl.no_puts;
  const double lacks = largest<1>(join.comm, {missing.empty() ? 0.0 : 1.0})[0];
  if (lacks > 0 && choice.mode == NcclJoining::OneSided::kMeasure) return 0;
  if (lacks > 0) {
    const std::string own = std::to_string(join.comm.rank());
    throw Error(
        ErrorKind::kDevice,
        "HDPCOMM_NCCL_ONE_SIDED=1, but the ranks cannot put messages into each other's memory: " +
            (missing.empty() ? "another rank than " + own + " says why"
                             : "on rank " + own + ", " + missing) +
            "; unset it, or set it to auto to do so where it works and is faster",
        {.rank = join.comm.rank(),
         .peer = -1,
         .op = "init",
         .ranks = join.comm.ranks(),
         .seq = -1});
  }
  join.world.openWindow(2 * choice.bytes, join.raw(), join.check);
  if (choice.mode == NcclJoining::OneSided::kOn) return choice.bytes;
  const size_t bytes = std::min<size_t>(choice.bytes, 4 * kMiB);
  const std::array<double, 2> seconds =
      largest<2>(join.comm, {ringSeconds(join, bytes, false), ringSeconds(join, bytes, true)});
  if (seconds[1] < seconds[0]) return choice.bytes;
  join.world.closeWindow(join.check);
  return 0;
}

}  // namespace

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
  const Joining join{comm, *device, *world, stream.get(), check};
  device->fill(bytes.get(), 0, 2, stream.get());
  world->connectAhead(nccl.connect_distance, static_cast<std::byte*>(bytes.get()), join.raw(),
                      check);
  join.synchronize();
  const size_t landing_bytes = openLanding(join, nccl);
  join.synchronize();
  return std::make_unique<NcclMover>(device, std::move(world), costs, landing_bytes);
}

}  // namespace hdpcomm
