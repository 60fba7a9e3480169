// Messages by slots or landing places of a peer's arena, and schedules on streams. The schedule's
// own order is one stream's order; the transfers of a step leave it for the lanes of their pairs
// and come back before the next step.
#include "transport/stream/links/link_mover.hpp"

#include <algorithm>

#include "kernels/reduce.hpp"
#include "transport/stream/links/retired.hpp"

namespace hdpcomm {

using device::Arena;
using device::SharedBoard;

namespace {

std::byte* at(const std::array<std::byte*, 3>& buffers, const Span& span) {
  return buffers[static_cast<size_t>(span.buffer)] + span.offset;
}

}  // namespace

LinkMover::LinkMover(DevicePtr device, std::unique_ptr<Arena> arena,
                     std::shared_ptr<SharedBoard> board, const DeviceCosts& costs,
                     std::vector<int> places, int rank)
    : device_(std::move(device)),
      places_(std::move(places)),
      rank_(rank),
      place_(placeOf(rank)),
      landing_bytes_(arena->config().landing_bytes),
      arena_(std::move(arena)),
      board_(std::move(board)),
      scratch_(device_),
      step_event_(device_, device_->createEvent()),
      costs_(costs),
      reads_(device_, *arena_, place_),
      peers_(places_.size()) {}

std::vector<int> LinkMover::placesOf(const std::vector<int>& ranks) const {
  std::vector<int> places;
  places.reserve(ranks.size());
  for (const int rank : ranks) places.push_back(placeOf(rank));
  return places;
}

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
    entry.link = std::make_unique<device::Link>(device_, *arena_, place_, placeOf(peer));
  }
  use(peer);
  return *entry.link;
}

PlanningRules LinkMover::planning(const std::vector<int>& /*ranks*/) const {
  return {
      .choose = [this](const ScheduleRequest& request) { return chooseAlgorithm(request, costs_); },
      .peer_reads = true};
}

void LinkMover::prepare(const Messages& sends, const Messages& recvs, bool /*captured*/) {
  for (const Message& message : sends) checkLanding(message, false);
  for (const Message& message : recvs) checkLanding(message, true);
}

namespace {

device::PeerReads::Operation readsOf(const StreamMover::Collective& operation,
                                     const std::vector<int>& places) {
  return {operation.plan.call, &places, operation.in, operation.out};
}

}  // namespace

StreamMover::Traffic LinkMover::trafficOf(const Collective& operation) const {
  if (operation.plan.schedule != nullptr) return StreamMover::trafficOf(operation);
  const std::vector<int> places = placesOf(operation.ranks);
  const auto reads = readsOf(operation, places);
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
  const std::vector<int> places = placesOf(operation.ranks);
  const auto reads = readsOf(operation, places);
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
  Pass pass(*this, operation);
  for (const Step& step : operation.plan.schedule->steps) {
    runMoves(step, operation.plan.call, buffers, operation.stream);
    pass.begin(step, buffers);
    pass.end();
  }
  pass.finish();
}

void LinkMover::Pass::begin(const Step& step, const Buffers& buffers) {
  const Call& call = operation_.plan.call;
  TransportStats& stats = mover_.stats_;
  const auto rankOf = [&](int peer) { return operation_.ranks[static_cast<size_t>(peer)]; };
  const auto linked = [&](const auto& transfer) { return mover_.lands(rankOf(transfer.peer)); };
  if (std::none_of(step.sends.begin(), step.sends.end(), linked) &&
      std::none_of(step.recvs.begin(), step.recvs.end(), linked)) {
    return;
  }
  const Event begin = mover_.step_event_.get();
  mover_.device_->record(begin, operation_.stream);
  device::Fork& fork = fork_.emplace(*mover_.device_, begin);
  device::Fork late(*mover_.device_, begin);
  for (const Recv& recv : step.recvs) {
    if (!linked(recv)) continue;
    mover_.link(rankOf(recv.peer))
        .receive({.data = at(buffers, recv.to),
                  .bytes = recv.to.bytes,
                  .operand = recv.reduce ? at(buffers, recv.operand) : nullptr,
                  .dtype = call.dtype,
                  .redop = call.redop},
                 fork);
    ++stats.messages_received;
    stats.bytes_received += recv.to.bytes;
  }
  for (const Send& send : step.sends) {
    if (!linked(send)) continue;
    mover_.link(rankOf(send.peer))
        .send(at(buffers, send.from), send.from.bytes, send.deferred ? late : fork);
    ++stats.messages_sent;
    stats.bytes_sent += send.from.bytes;
  }
  if (!late.lanes().empty()) deferred_.push_back(std::move(late));
}

void LinkMover::Pass::end() {
  if (fork_) fork_->join(operation_.stream);
  fork_.reset();
}

void LinkMover::Pass::finish() {
  for (device::Fork& late : deferred_) late.join(operation_.stream);
  deferred_.clear();
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
  scratch_.free();
  device_->annotateRelease(board_->key());
  board_->depart(rank_);
  device::retireArena(std::move(arena_), board_);
}

}  // namespace hdpcomm
