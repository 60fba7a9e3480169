// Messages by slots or landing places of a peer's arena. The transfers of a schedule's step leave
// the run's stream for the lanes of their pairs and come back before the next step.
#include "transport/stream/links/link_mover.hpp"

#include <algorithm>
#include <map>
#include <optional>

#include "transport/stream/links/retired.hpp"

namespace hdpcomm {

using device::Arena;
using device::SharedBoard;

LinkMover::LinkMover(DevicePtr device, std::unique_ptr<Arena> arena,
                     std::shared_ptr<SharedBoard> board, const DeviceTransportCosts& costs,
                     std::vector<int> places, int rank)
    : device_(std::move(device)),
      places_(std::move(places)),
      rank_(rank),
      place_(placeOf(rank)),
      landing_bytes_(arena->config().landing_bytes),
      arena_(std::move(arena)),
      board_(std::move(board)),
      scratch_(device_),
      events_(std::make_shared<EventPool>(device_)),
      fork_event_(device_, device_->createEvent()),
      costs_(costs),
      reads_(device_, *arena_, place_),
      small_(device_, *arena_, place_),
      peers_(places_.size()) {}

LinkMover::~LinkMover() {
  if (arena_ == nullptr) return;
  try {
    retire();
  } catch (const std::exception&) {  // no memory for the list: the arena goes now
  }
}

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
    ++num_used_;
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

// --- exchanges

void LinkMover::receive(const Message& message, device::Fork& fork, device::Rounds& rounds) {
  device::Link& from = link(message.peer);
  if (message.landing == kNoLanding) {
    rounds.receive(from, {.data = message.data, .bytes = message.bytes()}, fork);
  } else {
    rounds.land(from, fork);
  }
  counts_.countReceived(message.bytes());
}

void LinkMover::send(const Message& message, device::Fork& fork, device::Rounds& rounds) {
  device::Link& to = link(message.peer);
  if (message.landing == kNoLanding) {
    rounds.send(to, message.data, message.bytes(), fork);
  } else {
    rounds.put(to, message.data, message.bytes(), message.landing, fork);
  }
  counts_.countSent(message.bytes());
}

class LinkMover::LinkExchange final : public PreparedExchange {
 public:
  LinkExchange(LinkMover& mover, const Exchange& operation)
      : mover_(mover), operation_(operation) {}

  std::vector<End> enqueue(Event begin, const WaitCheck& check) && override {
    device::Fork fork(*mover_.device_, begin);
    device::MarkPtr end;  // of what the caller's stream was given
    for (const SmallRound& round : smallRounds()) {
      if (device::MarkPtr last = run(round, fork, check)) end = std::move(last);
    }
    const bool on_caller = landsOnCaller();
    if (on_caller) {
      end = land();
    } else {
      runOnLanes(fork, check);
    }
    std::vector<End> ends;
    if (end != nullptr) ends.push_back({end->stream, end->end});
    for (const device::Lane* lane : fork.lanes()) {
      ends.push_back({lane->stream(), mover_.events_->record(lane->stream())});
      if (!on_caller) markLandings(*lane, ends.back());
    }
    if (on_caller) markLandings(end);
    return ends;
  }

 private:
  using SmallMessages = device::SmallMessages::Messages;

  // Small messages of a round, as many of a pair and direction as there are slots (Rounds): those
  // that the caller's stream may hold, and by peer those that a lane of the pair holds, since they
  // run in the background or come after one there.
  struct SmallRound {
    SmallMessages sends, recvs;
    std::map<int, SmallMessages> sends_beside, recvs_beside;
  };

  std::vector<SmallRound> smallRounds() {
    std::vector<SmallRound> rounds;
    for (const bool out : {true, false}) {
      std::map<int, std::pair<bool, size_t>> of_peers;  // on the caller's stream, how many
      for (const Message& message : out ? operation_.sends : operation_.recvs) {
        if (!mover_.isSmall(message)) continue;
        const int place = mover_.placeOf(message.peer);
        const auto [found, first] = of_peers.try_emplace(message.peer);
        auto& [direct, count] = found->second;
        if (first) {
          mover_.use(message.peer);
          direct = !operation_.background &&
                   !mover_.small_.pending(place, out, operation_.caller, operation_.captured);
        }
        const size_t round = count++ / device::kSmallSlots;
        if (round >= rounds.size()) rounds.resize(round + 1);
        SmallRound& in = rounds[round];
        SmallMessages& on = direct ? (out ? in.sends : in.recvs)
                                   : (out ? in.sends_beside : in.recvs_beside)[message.peer];
        on.push_back({place, message.data, message.bytes()});
        out ? mover_.counts_.countSent(message.bytes())
            : mover_.counts_.countReceived(message.bytes());
      }
    }
    return rounds;
  }

  // The end on the caller's stream; null: it was given nothing.
  device::MarkPtr run(const SmallRound& round, device::Fork& fork, const WaitCheck& check) {
    if (round.sends_beside.empty() && round.recvs_beside.empty()) {
      return exchange(round.sends, round.recvs, operation_.caller);
    }
    const device::MarkPtr sent = exchange(round.sends, {}, operation_.caller);
    exchangeBeside(round.sends_beside, true, fork, check);
    const device::MarkPtr received = exchange({}, round.recvs, operation_.caller);
    exchangeBeside(round.recvs_beside, false, fork, check);
    return received != nullptr ? received : sent;
  }

  device::MarkPtr exchange(const SmallMessages& sends, const SmallMessages& recvs, Stream stream) {
    if (sends.empty() && recvs.empty()) return nullptr;
    return mover_.small_.exchange(sends, recvs, DType::kUint8, RedOp::kNone, stream);
  }

  // Whether all that is not small is one message with a landing place, or one each way, and the
  // caller's stream waits for it: then lanes would only cost events.
  bool landsOnCaller() const {
    if (operation_.background) return false;
    size_t landings = 0;
    for (const Messages* messages : {&operation_.sends, &operation_.recvs}) {
      size_t here = 0;
      for (const Message& message : *messages) {
        if (mover_.isSmall(message)) continue;
        if (message.landing == kNoLanding || ++here > 1) return false;
      }
      landings += here;
    }
    return landings > 0;
  }

  // On the caller's stream, in the order of a round (rounds.hpp): the own place is told to be free,
  // then the peer's is awaited.
  device::MarkPtr land() {
    const auto landing = [&](const Messages& messages) {
      const auto found = std::find_if(messages.begin(), messages.end(), [&](const Message& each) {
        return each.landing != kNoLanding;
      });
      return found != messages.end() ? &*found : nullptr;
    };
    const Message* sent = landing(operation_.sends);
    const Message* received = landing(operation_.recvs);
    const Stream stream = operation_.caller;
    device::Link* to = sent != nullptr ? &mover_.link(sent->peer) : nullptr;
    device::Link* from = received != nullptr ? &mover_.link(received->peer) : nullptr;
    device::FlagBatch flags;
    if (from != nullptr) {
      from->followLandings(false, stream, operation_.captured);
      from->tellClear(flags);
    }
    if (to != nullptr) {
      to->followLandings(true, stream, operation_.captured);
      to->awaitClear(flags);
      flags.flush(*mover_.device_, stream);
      to->copyToLanding(sent->data, sent->bytes(), sent->landing, stream);
      to->tellLanded(flags);
      mover_.counts_.countSent(sent->bytes());
    }
    if (from != nullptr) {
      from->awaitLanded(flags);
      mover_.counts_.countReceived(received->bytes());
    }
    flags.flush(*mover_.device_, stream);
    return std::make_shared<device::Mark>(
        device::Mark{mover_.events_->record(stream), stream, operation_.captured});
  }

  // For the next messages to landing places of the same pairs and directions.
  void markLandings(const device::MarkPtr& end, const device::Lane* lane = nullptr) {
    for (const bool out : {false, true}) {
      for (const Message& message : out ? operation_.sends : operation_.recvs) {
        if (message.landing == kNoLanding) continue;
        device::Link& link = mover_.link(message.peer);
        if (lane == nullptr || lane == &link.firstLane(out)) link.markLanding(out, end);
      }
    }
  }
  void markLandings(const device::Lane& lane, const End& end) {
    markLandings(
        std::make_shared<device::Mark>(device::Mark{end.event, end.stream, operation_.captured}),
        &lane);
  }

  void runOnLanes(device::Fork& fork, const WaitCheck& check) {
    device::Rounds rounds;
    for (const Message& message : operation_.recvs) {
      if (!mover_.isSmall(message)) mover_.receive(message, fork, rounds);
    }
    for (const Message& message : operation_.sends) {
      if (!mover_.isSmall(message)) mover_.send(message, fork, rounds);
    }
    rounds.run(check);
  }

  void exchangeBeside(const std::map<int, SmallMessages>& by_peer, bool out, device::Fork& fork,
                      const WaitCheck& check) {
    for (const auto& [peer, messages] : by_peer) {
      device::Lane& lane = mover_.link(peer).firstLane(out);
      lane.pass(messages.size() + 3, check);
      const Stream stream = fork.enter(lane);
      out ? exchange(messages, {}, stream) : exchange({}, messages, stream);
    }
  }

  LinkMover& mover_;
  const Exchange operation_;
};

std::unique_ptr<StreamMover::PreparedExchange> LinkMover::prepare(const Exchange& operation) {
  for (const Message& message : operation.sends) checkLanding(message, false);
  for (const Message& message : operation.recvs) checkLanding(message, true);
  return std::make_unique<LinkExchange>(*this, operation);
}

// --- collectives that read the peers' memory

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
class LinkMover::PeerReadCollective final : public PreparedCollective {
 public:
  PeerReadCollective(LinkMover& mover, const Collective& operation)
      : mover_(mover), operation_(operation) {}

  Fence enqueue(const WaitCheck& check) && override {
    Fence end;
    const std::vector<int> places = mover_.placesOf(operation_.ranks);
    const auto reads = readsOf(operation_, places);
    if (isSmall(reads)) {
      end = enqueueSmall(reads);
    } else {
      const Event begin = mover_.fork_event_.get();
      mover_.device_->record(begin, operation_.stream);
      device::Fork fork(*mover_.device_, begin);
      device::Lane& lane = mover_.reads_.lane();
      fork.enter(lane);
      mover_.reads_.run(reads, lane, check);
      fork.join(operation_.stream);
    }
    for (int i = 0; i < static_cast<int>(operation_.ranks.size()); ++i) {
      const int peer = operation_.ranks[static_cast<size_t>(i)];
      if (peer == mover_.rank_) continue;
      mover_.use(peer);
      const size_t bytes = mover_.reads_.bytesWith(reads, i);
      mover_.counts_.countSent(bytes);
      mover_.counts_.countReceived(bytes);
    }
    return end;
  }

 private:
  // The same on all ranks: the board compares where operands lie.
  bool isSmall(const device::PeerReads::Operation& reads) const {
    const Call& call = reads.call;
    return call.algorithm != Algorithm::kTwoShot && call.count > 0 &&
           mover_.small_.fits(call.count * dtypeBytes(call.dtype)) && !mover_.reads_.placeOf(reads);
  }

  // Each rank gives every other one what that one needs, so nobody has to meet.
  Fence enqueueSmall(const device::PeerReads::Operation& reads) {
    const Call& call = reads.call;
    const std::vector<int>& places = *reads.ranks;
    const size_t bytes = call.count * dtypeBytes(call.dtype);
    const auto own = static_cast<size_t>(std::find(places.begin(), places.end(), mover_.place_) -
                                         places.begin());
    auto* in = const_cast<std::byte*>(reads.in);
    if (call.op != OpCode::kAllGather) {
      std::vector<std::byte*> parts;
      for (size_t i = 0; i < places.size(); ++i) {
        parts.push_back(call.op == OpCode::kReduceScatter ? in + i * bytes : in);
      }
      return mover_.small_
          .reduce({places, static_cast<int>(own), std::move(parts), reads.out, call.count,
                   call.dtype, call.redop},
                  operation_.stream)
          ->end;
    }
    device::SmallMessages::Messages sends;
    device::SmallMessages::Messages recvs;
    for (size_t i = 0; i < places.size(); ++i) {
      if (i == own) continue;
      sends.push_back({places[i], in, bytes});
      recvs.push_back({places[i], reads.out + i * bytes, bytes});
    }
    const device::MarkPtr end =
        mover_.small_.exchange(sends, recvs, call.dtype, RedOp::kNone, operation_.stream);
    if (reads.out + own * bytes == in) return end->end;
    mover_.device_->copy(reads.out + own * bytes, in, bytes, operation_.stream);
    return nullptr;
  }

  LinkMover& mover_;
  const Collective operation_;
};

// --- schedules

class LinkMover::Transfers final : public StepTransfers {
 public:
  Transfers(LinkMover& mover, const ScheduleRun& run) : mover_(mover), run_(run) {}

  void start(size_t index, const WaitCheck& check) override {
    const Step& step = run_.schedule->steps[index];
    const auto linked = [&](const auto& each) { return mover_.lands(run_.globalRank(each.peer)); };
    if (std::none_of(step.sends.begin(), step.sends.end(), linked) &&
        std::none_of(step.recvs.begin(), step.recvs.end(), linked)) {
      return;
    }
    const auto small = [&](const auto& each, const Span& region) {
      return linked(each) && mover_.small_.fits(region.bytes);
    };
    device::SmallMessages::Messages sends;
    device::SmallMessages::Messages recvs;
    bool others = false;
    for (const Send& send : step.sends) {
      if (!linked(send)) continue;
      if (small(send, send.from)) {
        sends.push_back(smallOf(send.peer, addressOf(run_.buffers, send.from), send.from.bytes));
        mover_.counts_.countSent(send.from.bytes);
      } else {
        others = true;
      }
    }
    for (const Recv& recv : step.recvs) {
      if (!linked(recv)) continue;
      if (small(recv, recv.to)) {
        recvs.push_back(smallOf(recv.peer, addressOf(run_.buffers, recv.to), recv.to.bytes));
        if (recv.reduce) recvs.back().operand = addressOf(run_.buffers, recv.operand);
        mover_.counts_.countReceived(recv.to.bytes);
      } else {
        others = true;
      }
    }
    if (others) {
      const Event begin = mover_.fork_event_.get();
      mover_.device_->record(begin, run_.stream);
      startLarge(step, begin, check);
    }
    if (!sends.empty() || !recvs.empty()) {
      mover_.small_.exchange(sends, recvs, run_.call.dtype, run_.call.redop, run_.stream);
    }
  }

  void join() override {
    if (fork_) fork_->join(run_.stream);
    fork_.reset();
  }

  void finish(const WaitCheck& /*check*/) override {
    for (device::Fork& late : deferred_) late.join(run_.stream);
    deferred_.clear();
  }

 private:
  device::SmallMessages::Message smallOf(int peer, std::byte* data, size_t bytes) {
    const int rank = run_.globalRank(peer);
    mover_.use(rank);
    return {mover_.placeOf(rank), data, bytes};
  }

  // The messages of a step that are not small, on lanes.
  void startLarge(const Step& step, Event begin, const WaitCheck& check) {
    const auto large = [&](const auto& each, const Span& region) {
      return mover_.lands(run_.globalRank(each.peer)) && !mover_.small_.fits(region.bytes);
    };
    device::Fork& fork = fork_.emplace(*mover_.device_, begin);
    device::Fork late(*mover_.device_, begin);
    device::Rounds rounds;
    for (const Recv& recv : step.recvs) {
      if (large(recv, recv.to)) receive(recv, fork, rounds);
    }
    for (const Send& send : step.sends) {
      if (large(send, send.from)) this->send(send, send.deferred ? late : fork, rounds);
    }
    rounds.run(check);
    if (!late.lanes().empty()) deferred_.push_back(std::move(late));
  }

  void receive(const Recv& recv, device::Fork& fork, device::Rounds& rounds) {
    rounds.receive(mover_.link(run_.globalRank(recv.peer)),
                   {.data = addressOf(run_.buffers, recv.to),
                    .bytes = recv.to.bytes,
                    .operand = recv.reduce ? addressOf(run_.buffers, recv.operand) : nullptr,
                    .dtype = run_.call.dtype,
                    .redop = run_.call.redop},
                   fork);
    mover_.counts_.countReceived(recv.to.bytes);
  }

  void send(const Send& send, device::Fork& fork, device::Rounds& rounds) {
    rounds.send(mover_.link(run_.globalRank(send.peer)), addressOf(run_.buffers, send.from),
                send.from.bytes, fork);
    mover_.counts_.countSent(send.from.bytes);
  }

  LinkMover& mover_;
  const ScheduleRun run_;
  std::optional<device::Fork> fork_;    // of the step that is under way
  std::vector<device::Fork> deferred_;  // of deferred sends
};

std::unique_ptr<StepTransfers> LinkMover::transfersOf(const ScheduleRun& run) {
  return std::make_unique<Transfers>(*this, run);
}

std::unique_ptr<StreamMover::PreparedCollective> LinkMover::prepare(const Collective& operation) {
  const std::shared_ptr<const Schedule>& schedule = operation.plan.schedule;
  if (schedule == nullptr) return std::make_unique<PeerReadCollective>(*this, operation);
  std::byte* temp = schedule->temp_bytes > 0
                        ? scratch_.take(schedule->temp_bytes, operation.stream, operation.captured)
                        : nullptr;
  auto runner =
      std::make_unique<ScheduleRunner>(device_, ScheduleRun{schedule,
                                                            operation.plan.call,
                                                            operation.ranks,
                                                            {operation.in, operation.out, temp},
                                                            operation.stream});
  runner->add(transfersOf(runner->run()));
  return runner;
}

// --- the mover as a whole

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
  small_.release(control);
  for (const Peer& peer : peers_) {
    if (peer.link != nullptr) peer.link->release(control);
  }
}

// Peers may still write into this rank's arena, for instance a slot's credit: it is freed when all
// of them have retired.
void LinkMover::retire() {
  peers_.clear();
  scratch_.free();
  device_->annotateRelease(board_->key());
  board_->depart(rank_);
  device::retireArena(std::move(arena_), board_);
}

}  // namespace hdpcomm
