#include "comm/stream/stream_engine.hpp"

#include <algorithm>
#include <cstring>

#include "base/settings.hpp"

namespace hdpcomm {
namespace {

// Seconds: kernels that run longer with a full queue behind them, beside a rank that is gone, are
// nothing to wait for.
constexpr double kMostStuck = 30;

}  // namespace

using device::CallBoard;
using device::CallEntry;

Error StreamWork::withContext(const Error& error) const {
  ErrorContext context = error.context();
  context.rank = rank_;
  context.op = opName(call_.op);
  context.ranks = *ranks_;
  context.seq = seq_;
  return Error(error.kind(), error.what(), context);
}

StreamWork::Share& StreamWork::shareOf(int peer) {
  for (Share& share : shares_) {
    if (share.peer == peer) return share;
  }
  return shares_.emplace_back(Share{.peer = peer});
}

std::shared_ptr<StreamEngine> StreamEngine::start(const Communicator& comm, DevicePtr device,
                                                  std::shared_ptr<CallBoard> board,
                                                  std::unique_ptr<StreamMover> mover) {
  device->loadKernels();
  board->enter(comm.rank());
  // Every rank has mapped the board, and the memory that movers share, before any rank goes on.
  device->annotateRelease(board->key());
  comm.collective({}, {.op = OpCode::kBarrier}, 0, {});
  device->annotateAcquire(board->key());
  board->opened();
  return std::shared_ptr<StreamEngine>(
      new StreamEngine(std::move(device), std::move(board), std::move(mover), comm.world()),
      endEngine);
}

StreamEngine::StreamEngine(DevicePtr device, std::shared_ptr<CallBoard> board,
                           std::unique_ptr<StreamMover> mover, World& world)
    : device_(std::move(device)),
      world_(&world),
      num_ranks_(world.size()),
      rank_(world.rank()),
      timeout_s_(world.timeout()),
      board_(std::move(board)),
      events_(std::make_shared<EventPool>(device_)),
      mover_(std::move(mover)),
      host_stream_(device_->isSim() ? OwnedStream(device_, device_->createStream())
                                    : OwnedStream()),
      background_stream_(device_, device_->createStream()),
      control_stream_(device_, device_->createStream()),
      probe_(device_, device_->createEvent()),
      calls_(board_, rank_, num_ranks_),
      recorder_(Settings::read().flight_records),
      guard_(rank_, std::min(kMostStuck, timeout_s_), [this] { return lost(); }),
      watcher_([this] { watch(); }) {}

void StreamEngine::checkUsable() const {
  const ErrorContext context{.rank = rank_, .peer = -1, .op = {}, .ranks = {}, .seq = -1};
  if (closed_) {
    throw Error(ErrorKind::kInvalidUsage,
                "this communicator is closed: call its operations before close(), or make a new "
                "one with init()",
                context);
  }
  if (failed_) {
    throw Error(ErrorKind::kAborted,
                std::string("the device operations of this communicator ended with an error, and "
                            "their streams were released: make a new one with init(). The error "
                            "was: ") +
                    failed_->what(),
                context);
  }
}

StreamEngine::WorkPtr StreamEngine::begin(const Call& call, Ranks ranks, bool captured) {
  checkUsable();
  auto work = std::make_shared<StreamWork>(call, std::move(ranks), rank_, next_seq_++);
  work->captured_ = captured;
  work->by_liveness_ = world_->goesByLiveness();
  if (!work->captured_ && running_.size() >= look_at_) {
    collectEnded();
    look_at_ = std::max(kLeastLook, 2 * running_.size());
  }
  return work;
}

void StreamEngine::end(StreamWork& work, StreamWork::State state) {
  work.state_ = state;
  ++num_ended_;
  recorder_.end(work.flight_, state == StreamWork::State::kDone ? FlightRecord::State::kDone
                                                                : FlightRecord::State::kFailed);
}

FlightRecorder::Flight StreamEngine::flight() const {
  // A thread that is far ahead of its streams waits for them with the lock; whoever asks what hangs
  // does not wait with it.
  constexpr auto kPatience = std::chrono::seconds(1);
  std::unique_lock lock(mutex_, std::try_to_lock);
  for (const auto start = Clock::now(); !lock && Clock::now() - start < kPatience;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  return lock ? recorder_.read() : FlightRecorder::Flight{};
}

// A failed operation may have put part of its work on the caller's, the engine's and the mover's
// streams. It has ended when all of them have reached this point.
void StreamEngine::markEnds(StreamWork& work, Stream caller) {
  if (!work.begin_ || work.captured_) return;  // nothing was enqueued, or a capture is broken off
  std::vector<Stream> streams = mover_->streams();
  streams.insert(streams.end(), {caller, background_stream_.get()});
  try {
    for (const Stream stream : streams) work.ends_.push_back({stream, events_->record(stream)});
  } catch (const std::exception&) {  // the error that led here says more
    work.ends_missing_ = true;
  }
  work.submitted_ = true;
}

// Announces the operation to the peers, then enqueues it. A failure after the announcement ends the
// engine, since the peers count on this rank: then submit() throws when the operation's streams
// have drained, and has released the lock by then. If they do not drain, it returns, so that the
// caller gets the failed work, whose buffers are still in use.
template <typename Announce, typename Enqueue>
void StreamEngine::submit(std::unique_lock<std::mutex>& lock, const WorkPtr& work, Stream caller,
                          Announce announce, Enqueue enqueue) {
  if (const std::optional<Error> error = calls_.absenceError(*work)) throw *error;
  if (!work->captured_) running_.push_back(work);
  try {
    announce();
    compareCalls();
    if (failed_) throw work->error_ ? *work->error_ : *failed_;
    work->begin_ = events_->record(caller);
    enqueue();
  } catch (const std::exception& failure) {
    const Error error = work->withContext(errorOf(failure));
    markEnds(*work, caller);
    failWork(*work, error);
    lock.unlock();
    if (work->captured_ || awaitDrained(*work)) throw error;
    return;
  }
  work->submitted_ = true;
}

void StreamEngine::pace(Stream stream, size_t operations, const StreamMover::WaitCheck& check) {
  pacers_.try_emplace(stream.handle, device_).first->second.pass(stream, operations, check);
}

std::shared_ptr<StreamWork> StreamEngine::exchange(const Call& call, Ranks ranks,
                                                   const std::vector<Message>& sends,
                                                   const std::vector<Message>& recvs, Stream caller,
                                                   bool background) {
  std::unique_lock lock(mutex_);
  checkUsable();
  const StreamMover::Exchange operation{.sends = sends,
                                        .recvs = recvs,
                                        .caller = caller,
                                        .background = background,
                                        .captured = device_->isCapturing(caller)};
  const std::unique_ptr<StreamMover::PreparedExchange> prepared = mover_->prepare(operation);
  Call described = call;
  if (sends.size() + recvs.size() == 1) {  // for error messages
    const Message& only = sends.empty() ? recvs[0] : sends[0];
    described.count = only.count;
    described.dtype = only.dtype;
  }
  const WorkPtr work = begin(described, std::move(ranks), operation.captured);
  for (const Message& message : sends) calls_.plan(*work, message.peer, 1, 0);
  for (const Message& message : recvs) calls_.plan(*work, message.peer, 0, 1);
  const auto entryOf = [&](const Message& message) {
    CallEntry entry{call, message.landing, message.count * dtypeBytes(message.dtype),
                    work->captured_ && mover_->capturesAlike(message.peer)};
    entry.call.count = message.count;
    entry.call.dtype = message.dtype;
    return entry;
  };
  const auto announce = [&] {
    for (const Message& message : sends) {
      const CallEntry entry = entryOf(message);
      const uint64_t number = calls_.posted(message.peer);
      if (recorder_.on()) {
        recorder_.addMessage(work->flight_, entry.call, work->seq_, message.peer, true, number);
      }
      calls_.post(message.peer, entry);
    }
    for (const Message& message : recvs) {
      const CallEntry entry = entryOf(message);
      const uint64_t number = calls_.expected(message.peer);
      if (recorder_.on()) {
        recorder_.addMessage(work->flight_, entry.call, work->seq_, message.peer, false, number);
      }
      calls_.expect(work, message.peer, entry);
    }
  };
  submit(lock, work, caller, announce, [&] {
    const StreamMover::WaitCheck check = waitCheckOf(*work);
    pace(caller, 2 + 2 * (sends.size() + recvs.size()), check);
    for (StreamMover::End& end : std::move(*prepared).enqueue(*work->begin_, check)) {
      if (end.event == nullptr) end.event = events_->record(end.stream);
      if (!background && end.stream != caller) device_->wait(caller, *end.event);
      work->ends_.push_back(std::move(end));
    }
  });
  return work;
}

std::shared_ptr<StreamWork> StreamEngine::collective(const CollectivePlan& plan, Ranks ranks,
                                                     const void* in, void* out, Stream caller,
                                                     bool background) {
  if (plan.call.redop != RedOp::kNone) reduceFunction(plan.call.dtype, plan.call.redop);  // throws
  std::unique_lock lock(mutex_);
  const WorkPtr work = begin(plan.call, std::move(ranks), device_->isCapturing(caller));
  const Stream stream = background ? background_stream_.get() : caller;
  const StreamMover::Collective operation{.plan = plan,
                                          .ranks = *work->ranks_,
                                          .in = static_cast<std::byte*>(const_cast<void*>(in)),
                                          .out = static_cast<std::byte*>(out),
                                          .stream = stream,
                                          .captured = work->captured_};
  const std::unique_ptr<StreamMover::PreparedCollective> prepared = mover_->prepare(operation);
  const StreamMover::Traffic traffic = mover_->trafficOf(operation);
  for (const int peer : *work->ranks_) {
    if (peer != rank_) calls_.plan(*work, peer, 1, 1);
  }
  const auto announce = [&] {
    if (recorder_.on()) recorder_.add(work->flight_, plan.call, *work->ranks_, work->seq_);
    for (size_t i = 0; i < work->ranks_->size(); ++i) {
      const int peer = (*work->ranks_)[i];
      if (peer == rank_) continue;
      const bool captured = work->captured_ && mover_->capturesAlike(peer);
      calls_.post(peer, {plan.call, traffic.landing, traffic.sent[i], captured});
      calls_.expect(work, peer, {plan.call, traffic.landing, traffic.received[i], captured});
    }
  };
  submit(lock, work, caller, announce, [&] {
    const StreamMover::WaitCheck check = waitCheckOf(*work);
    const size_t steps = plan.schedule == nullptr ? 1 : plan.schedule->steps.size();
    pace(stream, 8 * (steps + 1), check);
    if (background) device_->wait(stream, *work->begin_);
    Fence end = std::move(*prepared).enqueue(check);
    work->ends_.push_back({stream, end != nullptr ? std::move(end) : events_->record(stream)});
  });
  return work;
}

size_t StreamEngine::scratchBytes() const {
  const std::lock_guard lock(mutex_);
  return mover_->scratchBytes();
}

Stats StreamEngine::stats() const {
  const std::lock_guard lock(mutex_);
  Stats stats = mover_->stats();
  stats["wait_ns"] = static_cast<uint64_t>(waited_.total() / std::chrono::nanoseconds(1));
  return stats;
}

double StreamEngine::waitedSeconds(const Ranks& ranks) {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(waited_.of(ranks)).count();
}

}  // namespace hdpcomm
