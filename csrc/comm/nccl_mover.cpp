#include "hdpcomm/comm/nccl_mover.hpp"

#include "hdpcomm/transport/device/link.hpp"

namespace hdpcomm {
namespace {

NcclStream ncclStreamOf(Stream stream) { return reinterpret_cast<NcclStream>(stream.handle); }

constexpr double kClear = 60;  // seconds, for some bytes

Stream streamOf(NcclStream stream) { return {reinterpret_cast<uintptr_t>(stream)}; }

}  // namespace

void StreamNcclDevice::reserve(size_t bytes, Stream stream, bool captured) {
  reserved_ = bytes > 0 ? pool_.take(bytes, stream, captured) : nullptr;
}

void* StreamNcclDevice::allocate(size_t /*bytes*/, NcclStream /*stream*/) { return reserved_; }

void StreamNcclDevice::clear(void* memory, size_t bytes, NcclStream stream) {
  device_->fill(memory, 0, bytes, streamOf(stream));
}

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
      tokens_(device_, device_->allocate(NcclWorld::kMaxExchange)),
      costs_(costs),
      world_(std::move(world)) {
  device_->fill(tokens_.get(), 0, NcclWorld::kMaxExchange, background_stream_.get());
  device_->synchronize(background_stream_.get(), kClear);
}

Communicator::Planning NcclMover::planning(const std::vector<int>& /*ranks*/) const {
  return {.choose = [this](const ScheduleRequest& request) {
    return chooseAlgorithm(request, costs_.inside, costs_.between);
  }};
}

void NcclMover::prepare(const Messages& sends, const Messages& recvs, bool captured) {
  NcclWorld::checkExchange(sends.size(), recvs.size());
  for (const Messages* messages : {&sends, &recvs}) {
    for (const Message& message : *messages) {
      if (captured) world_->checkConnected(message.peer);
    }
  }
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
  if (operation.captured) world_->checkConnected(operationOf(operation));
  memory_->reserve(world_->scratchBytes(operationOf(operation)), operation.stream,
                   operation.captured);
}

std::vector<Stream> NcclMover::exchange(const Exchange& operation, const Look& look) {
  const Stream stream = operation.background ? background_stream_.get() : operation.caller;
  if (operation.background) device_->wait(stream, operation.begin);
  // NCCL sends nothing for an empty message, and then neither side waits for the other.
  const auto described = [](const Messages& messages, std::byte* token) {
    std::vector<NcclWorld::Message> result;
    for (const Message& each : messages) {
      const size_t bytes = each.count * dtypeBytes(each.dtype);
      if (bytes > 0) {
        result.push_back({each.data, bytes, each.peer});
      } else {
        result.push_back({token++, 1, each.peer});
      }
    }
    return result;
  };
  auto* const tokens = static_cast<std::byte*>(tokens_.get());
  const auto sends = described(operation.sends, tokens);
  const auto recvs = described(operation.recvs, tokens + operation.sends.size());
  if (!sends.empty() || !recvs.empty()) {
    world_->exchange(sends, recvs, ncclStreamOf(stream), look);
  }
  return {stream};
}

void NcclMover::collective(const Collective& operation, NcclWorld::Beside* beside,
                           const Look& look) {
  NcclWorld::Operation described = operationOf(operation);
  described.beside = beside;
  world_->collective(described, ncclStreamOf(operation.stream), look);
}

void NcclMover::release(Stream /*control*/) { world_->abort(); }

void NcclMover::retire() {
  last_ = world_->stats();
  world_->retire();
  world_.reset();
  memory_->free();
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

StreamMover::NcclUse NcclMover::ncclUse() const {
  const NcclStats stats = world_ != nullptr ? world_->stats() : last_;
  return {stats.groups, stats.whole_world_ops, stats.buffer_bytes};
}

}  // namespace hdpcomm
