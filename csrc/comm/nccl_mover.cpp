#include "hdpcomm/comm/nccl_mover.hpp"

#include "hdpcomm/comm/host_board.hpp"
#include "hdpcomm/comm/stream_engine.hpp"
#include "hdpcomm/transport/device/link.hpp"

namespace hdpcomm {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(100);

NcclStream ncclStreamOf(Stream stream) { return reinterpret_cast<NcclStream>(stream.handle); }

Stream streamOf(NcclStream stream) { return {reinterpret_cast<uintptr_t>(stream)}; }

// Throws when a rank that has to join too is gone.
NcclWorld::Look lookForRanks(World& world) {
  return [&world, next = Clock::now() + kLookAgain]() mutable {
    if (Clock::now() < next) return;
    for (int rank = 0; rank < world.size(); ++rank) {
      if (const std::optional<Error> loss = world.departure(rank)) throw *loss;
    }
    next = Clock::now() + kLookAgain;
  };
}

}  // namespace

std::shared_ptr<StreamEngine> joinNccl(const Communicator& comm, DevicePtr device,
                                       const std::shared_ptr<const NcclApi>& api,
                                       int connect_distance, NcclCosts costs) {
  NcclUniqueId id{};
  if (comm.rank() == 0) ncclCheck(*api, api->getUniqueId(&id), "ncclGetUniqueId", nullptr, 0);
  const Communicator::Operands operands{.in = &id, .out = &id, .count = sizeof id};
  comm.collective(operands, {.op = OpCode::kBroadcast, .root = 0}, 0, {});
  comm.collective({.in = &costs, .out = &costs, .count = sizeof costs},
                  {.op = OpCode::kBroadcast, .root = 0}, 0, {});
  World& host = comm.world();
  const std::vector<int> nodes = host.nodesOf(comm.ranks());
  const NcclWorld::Look look = lookForRanks(host);
  auto memory = std::make_shared<StreamNcclDevice>(device);
  auto world = std::make_unique<NcclWorld>(api, memory, id, comm.rank(), comm.size(),
                                           host.timeout(), nodes, look);
  const OwnedStream stream(device, device->createStream());
  memory->reserve(2, stream.get(), false);
  world->connectAhead(connect_distance, ncclStreamOf(stream.get()), look);
  device->synchronize(stream.get(), host.timeout(), look);
  auto mover = std::make_unique<NcclMover>(device, std::move(memory), std::move(world), costs);
  std::shared_ptr<device::CallBoard> board;
  if (nodes.empty()) {
    board = StreamEngine::shareBoard(comm);
  } else {
    board = std::make_shared<HostBoard>(host);
  }
  return StreamEngine::start(comm, std::move(device), std::move(board), std::move(mover));
}

void StreamNcclDevice::reserve(size_t bytes, Stream stream, bool captured) {
  reserved_ = bytes > 0 ? pool_.take(bytes, stream, captured) : nullptr;
}

void* StreamNcclDevice::allocate(size_t /*bytes*/, NcclStream /*stream*/) { return reserved_; }

void StreamNcclDevice::copy(void* to, const void* from, size_t bytes, NcclStream stream) {
  device_->copy(to, from, bytes, streamOf(stream));
}

void StreamNcclDevice::reduce(void* out, const void* a, const void* b, size_t count, DType dtype,
                              RedOp op, NcclStream stream) {
  device::launchReduce(*device_, {out, a, b, static_cast<int64_t>(count), dtype, op},
                       streamOf(stream));
}

void StreamNcclDevice::scale(void* data, size_t count, DType dtype, double divisor,
                             NcclStream stream) {
  device::launchScale(*device_, {data, static_cast<int64_t>(count), divisor, dtype},
                      streamOf(stream));
}

NcclMover::NcclMover(DevicePtr device, std::shared_ptr<StreamNcclDevice> memory,
                     std::unique_ptr<NcclWorld> world, const NcclCosts& costs)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      background_stream_(device_, device_->createStream()),
      costs_(costs),
      world_(std::move(world)) {}

Communicator::Planning NcclMover::planning() const {
  return {.choose = [this](const ScheduleRequest& request) {
    return chooseAlgorithm(request, costs_.inside, costs_.between);
  }};
}

void NcclMover::prepare(const Messages& sends, const Messages& recvs) {
  NcclWorld::checkExchange(sends.size(), recvs.size());
  for (const Messages* messages : {&sends, &recvs}) {
    for (const Message& message : *messages) {
      if (message.landing == kNoLanding) continue;
      throwInvalidUsage(
          "exchange() got a landing place, but NCCL has no landing zone: leave it "
          "out where landing_zone() gives none");
    }
  }
}

NcclWorld::Operation NcclMover::operationOf(const Collective& operation) {
  return {.request = operation.plan.request,
          .ranks = operation.ranks,
          .in = operation.in,
          .out = operation.out,
          .dtype = operation.plan.call.dtype,
          .redop = operation.plan.call.redop,
          .schedule = operation.plan.schedule};
}

void NcclMover::prepare(const Collective& operation) {
  memory_->reserve(world_->scratchBytes(operationOf(operation)), operation.stream,
                   operation.captured);
}

std::vector<Stream> NcclMover::exchange(const Exchange& operation, const Look& look) {
  const Stream stream = operation.background ? background_stream_.get() : operation.caller;
  if (operation.background) device_->wait(stream, operation.begin);
  const auto withBytes = [](const Messages& messages) {
    std::vector<NcclWorld::Message> kept;
    for (const Message& each : messages) {
      const size_t bytes = each.count * dtypeBytes(each.dtype);
      if (bytes > 0) kept.push_back({each.data, bytes, each.peer});
    }
    return kept;
  };
  const auto sends = withBytes(operation.sends);
  const auto recvs = withBytes(operation.recvs);
  if (!sends.empty() || !recvs.empty()) {
    world_->exchange(sends, recvs, ncclStreamOf(stream), look);
  }
  return {stream};
}

void NcclMover::collective(const Collective& operation, const Look& look) {
  world_->collective(operationOf(operation), ncclStreamOf(operation.stream), look);
}

void NcclMover::release(Stream /*control*/) { world_->abort(); }

void NcclMover::retire() {
  last_ = world_->stats();
  world_->retire();
  world_.reset();
}

TransportStats NcclMover::stats() const {
  const NcclStats stats = world_ != nullptr ? world_->stats() : last_;
  return {.bytes_sent = stats.bytes_sent,
          .bytes_received = stats.bytes_received,
          .messages_sent = stats.messages_sent,
          .messages_received = stats.messages_received,
          .remote_bytes_sent = stats.remote_bytes_sent,
          .remote_bytes_received = stats.remote_bytes_received,
          .peers_used = stats.peers};
}

uint64_t NcclMover::predictedBufferBytes() const {
  return (world_ != nullptr ? world_->stats() : last_).buffer_bytes;
}

}  // namespace hdpcomm
