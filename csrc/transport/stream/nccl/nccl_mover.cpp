#include "transport/stream/nccl/nccl_mover.hpp"

#include <utility>

#include "base/error.hpp"
#include "transport/stream/nccl/nccl_transfers.hpp"

namespace hdpcomm {
namespace {

constexpr double kClearTimeout = 60;  // seconds, for some bytes

}  // namespace

NcclMover::NcclMover(DevicePtr device, std::unique_ptr<NcclWorld> world, const NcclCosts& costs,
                     size_t landing_bytes)
    : device_(std::move(device)),
      scratch_(device_),
      background_stream_(device_, device_->createStream()),
      tokens_(device_, device_->allocate(NcclWorld::kMaxExchange)),
      costs_(costs),
      landing_bytes_(landing_bytes),
      staged_(device_, device_->createEvent()),
      world_(std::move(world)) {
  device_->fill(tokens_.get(), 0, NcclWorld::kMaxExchange, background_stream_.get());
  device_->synchronize(background_stream_.get(), kClearTimeout);
}

PlanningRules NcclMover::planning(const std::vector<int>& /*ranks*/) const {
  return {.choose = [this](const ScheduleRequest& request) {
    return chooseAlgorithm(request, costs_.inside, costs_.between);
  }};
}

// --- exchanges

class NcclMover::NcclExchange final : public PreparedExchange {
 public:
  NcclExchange(NcclMover& mover, const Exchange& operation)
      : mover_(mover),
        operation_(operation),
        puts_(mover.landing_bytes_ > 0 && !operation.captured) {}

  std::vector<End> enqueue(Event begin, const WaitCheck& check) && override {
    DeviceApi& device = *mover_.device_;
    const Stream stream =
        operation_.background ? mover_.background_stream_.get() : operation_.caller;
    if (operation_.background) device.wait(stream, begin);
    auto* const tokens = static_cast<std::byte*>(mover_.tokens_.get());
    auto sends = mover_.describe(operation_.sends, tokens, puts_);
    const auto recvs = mover_.describe(operation_.recvs, tokens + operation_.sends.size(), puts_);
    if (puts_) mover_.stage(operation_.sends, sends, stream);
    if (!sends.empty() || !recvs.empty()) {
      mover_.world_->exchange(sends, recvs, ncclStreamOf(stream), check);
    }
    if (puts_) device.record(mover_.staged_.get(), stream);
    return {{stream, nullptr}};
  }

 private:
  NcclMover& mover_;
  const Exchange operation_;
  const bool puts_;
};

std::unique_ptr<StreamMover::PreparedExchange> NcclMover::prepare(const Exchange& operation) {
  if (operation.captured) world_->keepForGraph();
  NcclWorld::checkExchange(operation.sends.size(), operation.recvs.size());
  size_t staged = 0;
  for (const Messages* messages : {&operation.sends, &operation.recvs}) {
    const bool received = messages == &operation.recvs;
    for (const Message& message : *messages) {
      if (operation.captured) checkCaptured(message);
      if (message.landing == kNoLanding) continue;
      if (landing_bytes_ == 0) {
        throwInvalidUsage(
            "exchange() got a landing place, but NCCL has no landing zone here: leave it "
            "out where landing_zone() gives none");
      }
      checkLanding(message, received);
      if (!received && !inZone(message)) staged += paddedBytes(message.bytes());
    }
  }
  if (staged > landing_bytes_) {
    throwInvalidUsage(
        "exchange() got " + std::to_string(staged) +
        " bytes with landing places to send from outside of the landing zone; they are copied into "
        "memory of its size first, and it has " +
        std::to_string(landing_bytes_) + " (HDPCOMM_DEVICE_LANDING_BYTES)");
  }
  return std::make_unique<NcclExchange>(*this, operation);
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
  return message.data >= zone && message.data + message.bytes() <= zone + landing_bytes_;
}

// NCCL sends nothing for an empty message, and then neither side would wait for the other: a byte
// of the tokens instead. `puts`: whether messages with landing places are put. Into a graph nothing
// is put, nor to this rank itself: then the landing place is only where the data goes.
NcclWorld::Messages NcclMover::describe(const Messages& messages, std::byte* token,
                                        bool puts) const {
  NcclWorld::Messages result;
  for (const Message& each : messages) {
    if (each.bytes() == 0) {
      result.push_back({.data = token++, .bytes = 1, .peer = each.peer});
      continue;
    }
    result.push_back({.data = each.data, .bytes = each.bytes(), .peer = each.peer});
    const bool lands = each.landing != kNoLanding && each.peer != world_->rank();
    if (puts && lands) result.back().place = each.landing;
  }
  return result;
}

// What is put has to lie in the window. One block for all: each operation that copies into it comes
// after the puts of the one before.
void NcclMover::stage(const Messages& messages, NcclWorld::Messages& sends, Stream stream) {
  std::byte* free = world_->window() + landing_bytes_;
  bool waited = false;
  for (size_t i = 0; i < sends.size(); ++i) {
    NcclWorld::Message& each = sends[i];
    if (each.place == NcclWorld::kNoPlace || inZone(messages[i])) continue;
    if (!std::exchange(waited, true)) device_->wait(stream, staged_.get());
    device_->copy(free, each.data, each.bytes, stream);
    each.data = free;
    free += paddedBytes(each.bytes);
  }
}

// --- collectives

class NcclMover::WholeCollective final : public PreparedCollective {
 public:
  WholeCollective(NcclWorld& world, const Collective& operation)
      : world_(world),
        whole_{.op = operation.plan.request.op,
               .in = operation.in,
               .out = operation.out,
               .count = operation.plan.request.count,
               .dtype = operation.plan.call.dtype,
               .redop = operation.plan.call.redop,
               .root = operation.plan.request.root},
        stream_(operation.stream) {}

  Fence enqueue(const WaitCheck& check) && override {
    world_.runWhole(whole_, ncclStreamOf(stream_), check);
    return nullptr;
  }

 private:
  NcclWorld& world_;
  const NcclWorld::Whole whole_;
  const Stream stream_;
};

bool NcclMover::runsWhole(const Collective& operation) const {
  const ScheduleRequest& request = operation.plan.request;
  return request.algorithm == Algorithm::kAuto &&
         world_->hasWhole(request.op, operation.plan.call.dtype, operation.ranks);
}

std::unique_ptr<StreamMover::PreparedCollective> NcclMover::prepare(const Collective& operation) {
  if (!runsWhole(operation)) return prepareSchedule(operation);
  if (operation.captured) {
    world_->keepForGraph();
    world_->checkConnected(operation.plan.request.op);
  }
  return std::make_unique<WholeCollective>(*world_, operation);
}

std::unique_ptr<ScheduleRunner> NcclMover::prepareSchedule(const Collective& operation) {
  if (operation.captured) world_->keepForGraph();
  const std::shared_ptr<const nccl::GroupPlan> plan = plans_.get(
      operation.plan.request, operation.plan.schedule, world_->leftOutOf(operation.ranks));
  const auto rankOf = [&](int peer) { return operation.ranks[static_cast<size_t>(peer)]; };
  for (const nccl::Group& group : plan->groups) {
    if (!operation.captured) break;
    for (const Send& send : group.sends) world_->checkConnected(rankOf(send.peer));
    for (const Recv& recv : group.recvs) world_->checkConnected(rankOf(recv.peer));
  }
  std::byte* const scratch =
      scratch_.take(plan->scratchBytes(), operation.stream, operation.captured);
  auto runner =
      std::make_unique<ScheduleRunner>(device_, ScheduleRun{operation.plan.schedule,
                                                            operation.plan.call,
                                                            operation.ranks,
                                                            {operation.in, operation.out, scratch},
                                                            operation.stream});
  runner->add(std::make_unique<nccl::NcclTransfers>(*world_, device_, plan, runner->run()));
  return runner;
}

void NcclMover::retire() {
  last_stats_ = world_->stats();
  world_->retire();
  world_.reset();
  scratch_.free();
}

}  // namespace hdpcomm
