#include "transport/stream/nccl/nccl_mover.hpp"

#include <utility>

#include "base/error.hpp"
#include "transport/stream/nccl/nccl_transfers.hpp"

namespace hdpcomm {
namespace {

constexpr double kClearTimeout = 60;  // seconds, for some bytes

// NCCL sends nothing for an empty message, and then neither side would wait for the other: a byte
// of the tokens instead.
NcclWorld::Messages described(const StreamMover::Messages& messages, std::byte* token) {
  NcclWorld::Messages result;
  for (const StreamMover::Message& each : messages) {
    if (each.bytes() == 0) {
      result.push_back({.data = token++, .bytes = 1, .peer = each.peer});
    } else {
      result.push_back({.data = each.data, .bytes = each.bytes(), .peer = each.peer});
    }
  }
  return result;
}

}  // namespace

NcclMover::NcclMover(DevicePtr device, std::unique_ptr<NcclWorld> world, const NcclCosts& costs)
    : device_(std::move(device)),
      scratch_(device_),
      background_stream_(device_, device_->createStream()),
      tokens_(device_, device_->allocate(NcclWorld::kMaxExchange)),
      costs_(costs),
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
      : mover_(mover), operation_(operation) {}

  std::vector<End> enqueue(Event begin, const WaitCheck& check) && override {
    DeviceApi& device = *mover_.device_;
    const Stream stream =
        operation_.background ? mover_.background_stream_.get() : operation_.caller;
    if (operation_.background) device.wait(stream, begin);
    auto* const tokens = static_cast<std::byte*>(mover_.tokens_.get());
    const auto sends = described(operation_.sends, tokens);
    const auto recvs = described(operation_.recvs, tokens + operation_.sends.size());
    if (!sends.empty() || !recvs.empty()) {
      mover_.world_->exchange(sends, recvs, ncclStreamOf(stream), check);
    }
    return {{stream, nullptr}};
  }

 private:
  NcclMover& mover_;
  const Exchange operation_;
};

std::unique_ptr<StreamMover::PreparedExchange> NcclMover::prepare(const Exchange& operation) {
  if (operation.captured) world_->keepForGraph();
  NcclWorld::checkExchange(operation.sends.size(), operation.recvs.size());
  for (const Messages* messages : {&operation.sends, &operation.recvs}) {
    for (const Message& message : *messages) {
      if (operation.captured) world_->checkConnected(message.peer);
      if (message.landing == kNoLanding) continue;
      throwInvalidUsage(
          "exchange() got a landing place, but NCCL has no landing zone: leave it out where "
          "landing_zone() gives none");
    }
  }
  return std::make_unique<NcclExchange>(*this, operation);
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
