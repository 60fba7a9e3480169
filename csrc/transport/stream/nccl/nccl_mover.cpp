#include "transport/stream/nccl/nccl_mover.hpp"

#include <utility>

#include "transport/stream/links/link.hpp"

namespace hdpcomm {
namespace {

NcclStream ncclStreamOf(Stream stream) { return reinterpret_cast<NcclStream>(stream.handle); }

constexpr double kClear = 60;  // seconds, for some bytes

size_t alignedBytes(size_t bytes) { return (bytes + 511) / 512 * 512; }

size_t bytesOf(const StreamMover::Message& message) {
  return message.count * dtypeBytes(message.dtype);
}

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
                     std::unique_ptr<NcclWorld> world, const NcclCosts& costs, size_t landing_bytes)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      background_stream_(device_, device_->createStream()),
      tokens_(device_, device_->allocate(NcclWorld::kMaxExchange)),
      costs_(costs),
      landing_bytes_(landing_bytes),
      staged_(device_, device_->createEvent()),
      world_(std::move(world)) {
  device_->fill(tokens_.get(), 0, NcclWorld::kMaxExchange, background_stream_.get());
  device_->synchronize(background_stream_.get(), kClear);
}

PlanningRules NcclMover::planning(const std::vector<int>& /*ranks*/) const {
  return {.choose = [this](const ScheduleRequest& request) {
    return chooseAlgorithm(request, costs_.inside, costs_.between);
  }};
}

void NcclMover::prepare(const Messages& sends, const Messages& recvs, bool captured) {
  NcclWorld::checkExchange(sends.size(), recvs.size());
  size_t staged = 0;
  for (const Messages* messages : {&sends, &recvs}) {
    for (const Message& message : *messages) {
      if (captured) checkCaptured(message);
      if (message.landing == kNoLanding) continue;
      if (landing_bytes_ == 0) {
        throwInvalidUsage(
            "exchange() got a landing place, but NCCL has no landing zone here: leave it "
            "out where landing_zone() gives none");
      }
      checkLanding(message, messages == &recvs);
      if (messages == &sends && !inZone(message)) staged += alignedBytes(bytesOf(message));
    }
  }
  if (staged > landing_bytes_) {
    throwInvalidUsage(
        "exchange() got " + std::to_string(staged) +
        " bytes with landing places to send from outside of the landing zone; they are copied into "
        "memory of its size first, and it has " +
        std::to_string(landing_bytes_) + " (HDPCOMM_DEVICE_LANDING_BYTES)");
  }
  puts_ = landing_bytes_ > 0 && !captured;
}

// Connections cannot be made while a graph is captured, and puts make none.
void NcclMover::checkCaptured(const Message& message) const {
  if (message.landing == kNoLanding || world_->isConnected(message.peer)) {
    return world_->checkConnected(message.peer);
  }
  throwInvalidUsage("an exchange that is captured into a graph has a message with rank " +
                    std::to_string(message.peer) +
                    ", with which NCCL is not connected, since messages were put so far: set "
                    "HDPCOMM_NCCL_CONNECT to the distance of the ranks, or unset "
                    "HDPCOMM_NCCL_ONE_SIDED");
}

bool NcclMover::inZone(const Message& message) const {
  const std::byte* zone = world_->window();
  return message.data >= zone && message.data + bytesOf(message) <= zone + landing_bytes_;
}

// What is put has to lie in the window. One block for all: each operation that copies into it comes
// after the puts of the one before.
void NcclMover::stage(const Messages& messages, std::vector<NcclWorld::Message>& sends,
                      Stream stream) {
  std::byte* free = world_->window() + landing_bytes_;
  bool waited = false;
  for (size_t i = 0; i < sends.size(); ++i) {
    NcclWorld::Message& each = sends[i];
    if (each.place == NcclWorld::kNoPlace || inZone(messages[i])) continue;
    if (!std::exchange(waited, true)) device_->wait(stream, staged_.get());
    device_->copy(free, each.data, each.bytes, stream);
    each.data = free;
    free += alignedBytes(each.bytes);
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

// NCCL sends nothing for an empty message, and then neither side would wait for the other. Into a
// graph nothing is put, nor to this rank itself: then the landing place is only where the data
// goes.
std::vector<NcclWorld::Message> NcclMover::describe(const Messages& messages,
                                                    std::byte* token) const {
  std::vector<NcclWorld::Message> result;
  for (const Message& each : messages) {
    const size_t bytes = bytesOf(each);
    if (bytes == 0) {
      result.push_back({.data = token++, .bytes = 1, .peer = each.peer});
      continue;
    }
    result.push_back({.data = each.data, .bytes = bytes, .peer = each.peer});
    const bool lands = each.landing != kNoLanding && each.peer != world_->rank();
    if (puts_ && lands) result.back().place = each.landing;
  }
  return result;
}

std::vector<Stream> NcclMover::exchange(const Exchange& operation, const Look& look) {
  const Stream stream = operation.background ? background_stream_.get() : operation.caller;
  if (operation.background) device_->wait(stream, operation.begin);
  auto* const tokens = static_cast<std::byte*>(tokens_.get());
  auto sends = describe(operation.sends, tokens);
  const auto recvs = describe(operation.recvs, tokens + operation.sends.size());
  if (puts_) stage(operation.sends, sends, stream);
  if (!sends.empty() || !recvs.empty()) {
    world_->exchange(sends, recvs, ncclStreamOf(stream), look);
  }
  if (puts_) device_->record(staged_.get(), stream);
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
  return {stats.groups, stats.puts, stats.whole_world_ops, stats.buffer_bytes};
}

}  // namespace hdpcomm
