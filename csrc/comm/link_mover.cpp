// Messages by slots or landing places of a peer's arena, and schedules on streams. The schedule's
// own order is one stream's order; the transfers of a step leave it for the lanes of their pairs
// and come back before the next step.
#include "hdpcomm/comm/link_mover.hpp"

#include "hdpcomm/comm/stream_engine.hpp"
#include "hdpcomm/kernels/reduce.hpp"
#include "hdpcomm/transport/device/retired.hpp"

namespace hdpcomm {

using device::Arena;
using device::ArenaConfig;
using device::SharedBoard;

namespace {

// What every rank tells every other one as it joins.
struct Introduction {
  MemoryHandle arena;
  ArenaConfig config;
  int32_t ordinal;
  int32_t sim;
};

std::vector<Introduction> introduce(const Communicator& comm, const Introduction& own) {
  std::vector<Introduction> everyone(static_cast<size_t>(comm.size()));
  const Communicator::Operands operands{.in = &own, .out = everyone.data(), .count = sizeof own};
  comm.collective(operands, {.op = OpCode::kAllGather}, 0, {});
  return everyone;
}

void checkIntroductions(const Communicator& comm, const DevicePtr& device,
                        const std::vector<Introduction>& everyone) {
  const Introduction& own = everyone[static_cast<size_t>(comm.rank())];
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Introduction& other = everyone[static_cast<size_t>(peer)];
    const ErrorContext context{
        .rank = comm.rank(), .peer = peer, .op = "init", .ranks = comm.ranks(), .seq = -1};
    if (other.sim != own.sim || !(other.config == own.config)) {
      throw Error(ErrorKind::kMismatch,
                  "ranks " + std::to_string(comm.rank()) + " and " + std::to_string(peer) +
                      " joined with different transports or HDPCOMM_DEVICE_* settings: start all "
                      "ranks with the same ones",
                  context);
    }
    if (!device->canAccessPeer(other.ordinal)) {
      throw Error(ErrorKind::kInvalidUsage,
                  "device " + std::to_string(own.ordinal) + " of rank " +
                      std::to_string(comm.rank()) + " cannot read the memory of device " +
                      std::to_string(other.ordinal) + " of rank " + std::to_string(peer) +
                      ": this transport needs peer access between all GPUs; use another one",
                  context);
    }
  }
}

std::byte* at(const std::array<std::byte*, 3>& buffers, const Span& span) {
  return buffers[static_cast<size_t>(span.buffer)] + span.offset;
}

}  // namespace

std::shared_ptr<StreamEngine> joinLinks(const Communicator& comm, DevicePtr device,
                                        const ArenaConfig& config, DeviceCosts costs) {
  device::freeRetiredArenas();
  auto arena = std::make_unique<Arena>(device, config, comm.size(), comm.rank());
  const Introduction own{arena->exportOwn(), config, device->ordinal(), device->isSim()};
  const std::vector<Introduction> everyone = introduce(comm, own);
  checkIntroductions(comm, device, everyone);
  std::vector<MemoryHandle> handles;
  for (const Introduction& each : everyone) handles.push_back(each.arena);
  arena->importPeers(handles);
  costs.window_bytes = static_cast<double>(config.window_bytes);
  comm.collective({.in = &costs, .out = &costs, .count = sizeof costs},
                  {.op = OpCode::kBroadcast, .root = 0}, 0, {});
  const std::shared_ptr<SharedBoard> board = StreamEngine::shareBoard(comm);
  auto mover =
      std::make_unique<LinkMover>(device, std::move(arena), board, costs, comm.size(), comm.rank());
  return StreamEngine::start(comm, std::move(device), board, std::move(mover));
}

LinkMover::LinkMover(DevicePtr device, std::unique_ptr<Arena> arena,
                     std::shared_ptr<SharedBoard> board, const DeviceCosts& costs, int num_ranks,
                     int rank)
    : device_(std::move(device)),
      rank_(rank),
      arena_(std::move(arena)),
      board_(std::move(board)),
      scratch_(device_),
      step_event_(device_, device_->createEvent()),
      costs_(costs),
      reads_(device_, *arena_, rank),
      peers_(static_cast<size_t>(num_ranks)) {}

void LinkMover::use(int peer) {
  Peer& entry = peers_[static_cast<size_t>(peer)];
  if (!entry.used && peer != rank_) {
    entry.used = true;
    ++stats_.peers_used;
  }
}

device::Link& LinkMover::link(int peer) {
  Peer& entry = peers_[static_cast<size_t>(peer)];
  if (entry.link == nullptr) {
    entry.link = std::make_unique<device::Link>(device_, *arena_, rank_, peer);
  }
  use(peer);
  return *entry.link;
}

Communicator::Planning LinkMover::planning() const {
  return {
      .choose = [this](const ScheduleRequest& request) { return chooseAlgorithm(request, costs_); },
      .peer_reads = true};
}

void LinkMover::checkLanding(const Message& message, bool received) const {
  if (message.landing == kNoLanding) return;
  const size_t bytes = message.count * dtypeBytes(message.dtype);
  if (message.landing > landingBytes() || bytes > landingBytes() - message.landing) {
    throwInvalidUsage("exchange() got a landing place of " + std::to_string(bytes) + " bytes at " +
                      std::to_string(message.landing) + "; the zone has " +
                      std::to_string(landingBytes()) + " (HDPCOMM_DEVICE_LANDING_BYTES)");
  }
  if (received && message.data != landing() + message.landing) {
    throwInvalidUsage("exchange() got a receive whose tensor is not at offset " +
                      std::to_string(message.landing) +
                      " of the landing zone; pass a view of landing_zone().memory there");
  }
}

void LinkMover::prepare(const Messages& sends, const Messages& recvs) {
  for (const Message& message : sends) checkLanding(message, false);
  for (const Message& message : recvs) checkLanding(message, true);
}

namespace {

device::PeerReads::Operation readsOf(const StreamMover::Collective& operation) {
  return {operation.plan.call, &operation.ranks, operation.in, operation.out};
}

}  // namespace

StreamMover::Traffic LinkMover::trafficOf(const Collective& operation) const {
  if (operation.plan.schedule != nullptr) return StreamMover::trafficOf(operation);
  const auto reads = readsOf(operation);
  Traffic traffic;
  for (int i = 0; i < static_cast<int>(operation.ranks.size()); ++i) {
    traffic.sent.push_back(reads_.bytesWith(reads, i));
  }
  traffic.received = traffic.sent;
  traffic.landing = reads_.placeOf(reads).value_or(kNoLanding);
  return traffic;
}

// Beside the caller's stream: all such operations of the rank share its window, in order.
void LinkMover::readPeers(const Collective& operation) {
  device_->record(step_event_.get(), operation.stream);
  device::Fork fork(*device_, step_event_.get());
  const auto reads = readsOf(operation);
  reads_.run(reads, fork.enter(reads_.lane()));
  fork.join(operation.stream);
  for (int i = 0; i < static_cast<int>(operation.ranks.size()); ++i) {
    const int peer = operation.ranks[static_cast<size_t>(i)];
    if (peer == rank_) continue;
    use(peer);
    const size_t bytes = reads_.bytesWith(reads, i);
    ++stats_.messages_sent;
    ++stats_.messages_received;
    stats_.bytes_sent += bytes;
    stats_.bytes_received += bytes;
  }
}

void LinkMover::prepare(const Collective& operation) {
  if (operation.plan.schedule == nullptr) return;
  const size_t bytes = operation.plan.schedule->temp_bytes;
  temp_ = bytes > 0 ? scratch_.take(bytes, operation.stream, operation.captured) : nullptr;
}

std::vector<Stream> LinkMover::exchange(const Exchange& operation, const Look& /*look*/) {
  device::Fork fork(*device_, operation.begin);
  for (const Message& message : operation.recvs) receive(message, fork);
  for (const Message& message : operation.sends) send(message, fork);
  std::vector<Stream> streams;
  for (const device::Lane* lane : fork.lanes()) streams.push_back(lane->stream());
  return streams;
}

void LinkMover::receive(const Message& message, device::Fork& fork) {
  const size_t bytes = message.count * dtypeBytes(message.dtype);
  if (message.landing == kNoLanding) {
    link(message.peer).receive({.data = message.data, .bytes = bytes}, fork);
  } else {
    link(message.peer).land(bytes, fork);
  }
  ++stats_.messages_received;
  stats_.bytes_received += bytes;
}

void LinkMover::send(const Message& message, device::Fork& fork) {
  const size_t bytes = message.count * dtypeBytes(message.dtype);
  if (message.landing == kNoLanding) {
    link(message.peer).send(message.data, bytes, fork);
  } else {
    link(message.peer).put(message.data, bytes, message.landing, fork);
  }
  ++stats_.messages_sent;
  stats_.bytes_sent += bytes;
}

void LinkMover::collective(const Collective& operation, const Look& /*look*/) {
  if (operation.plan.schedule == nullptr) return readPeers(operation);
  runSchedule(operation, {operation.in, operation.out, temp_});
}

void LinkMover::runMoves(const Step& step, const Call& call, const Buffers& buffers,
                         Stream stream) {
  for (const Move& move : step.moves) {
    std::byte* to = at(buffers, move.to);
    const std::byte* from = at(buffers, move.from);
    if (move.to.bytes == 0) continue;
    const auto count = static_cast<int64_t>(move.to.bytes / dtypeBytes(call.dtype));
    switch (move.kind) {
      case MoveKind::kCopy:
        if (to != from) device_->copy(to, from, move.to.bytes, stream);
        break;
      case MoveKind::kReduce:
        device::launchReduce(*device_, {to, to, from, count, call.dtype, call.redop}, stream);
        break;
      case MoveKind::kScale:
        device::launchScale(*device_, {to, count, static_cast<double>(call.group_size), call.dtype},
                            stream);
        break;
    }
  }
}

void LinkMover::runSchedule(const Collective& operation, const Buffers& buffers) {
  const Call& call = operation.plan.call;
  const Stream stream = operation.stream;
  const auto peerOf = [&](int group_rank) -> device::Link& {
    return link(operation.ranks[static_cast<size_t>(group_rank)]);
  };
  std::vector<device::Fork> deferred;
  for (const Step& step : operation.plan.schedule->steps) {
    runMoves(step, call, buffers, stream);
    if (step.sends.empty() && step.recvs.empty()) continue;
    device_->record(step_event_.get(), stream);
    device::Fork fork(*device_, step_event_.get());
    device::Fork late(*device_, step_event_.get());
    for (const Recv& recv : step.recvs) {
      peerOf(recv.peer).receive({.data = at(buffers, recv.to),
                                 .bytes = recv.to.bytes,
                                 .operand = recv.reduce ? at(buffers, recv.operand) : nullptr,
                                 .dtype = call.dtype,
                                 .redop = call.redop},
                                fork);
      ++stats_.messages_received;
      stats_.bytes_received += recv.to.bytes;
    }
    for (const Send& send : step.sends) {
      peerOf(send.peer).send(at(buffers, send.from), send.from.bytes, send.deferred ? late : fork);
      ++stats_.messages_sent;
      stats_.bytes_sent += send.from.bytes;
    }
    fork.join(stream);
    if (!late.lanes().empty()) deferred.push_back(std::move(late));
  }
  for (device::Fork& late : deferred) late.join(stream);
}

std::vector<Stream> LinkMover::streams() const {
  std::vector<Stream> streams;
  reads_.addStreams(streams);
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr) peer.link->addStreams(streams);
  }
  return streams;
}

void LinkMover::release(Stream control) {
  reads_.release(control);
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr) peer.link->release(control);
  }
}

// Peers may still write into this rank's arena: a slot's credit, say. It goes when nobody does.
void LinkMover::retire() {
  peers_.clear();
  device_->annotateRelease(board_->key());
  board_->depart(rank_);
  device::retireArena(std::move(arena_), board_);
}

}  // namespace hdpcomm
