#include "comm/stream/join_nccl.hpp"

#include <chrono>

namespace hdpcomm {
namespace {

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
  device->fill(bytes.get(), 0, 2, stream.get());
  world->connectAhead(nccl.connect_distance, static_cast<std::byte*>(bytes.get()),
                      ncclStreamOf(stream.get()), check);
  device->synchronize(stream.get(), host.timeout(), check);
  return std::make_unique<NcclMover>(device, std::move(world), costs);
}

}  // namespace hdpcomm
