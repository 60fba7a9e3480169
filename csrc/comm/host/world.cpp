#include "comm/host/world.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/settings.hpp"
#include "transport/failures.hpp"

namespace hdpcomm {

World::World(std::unique_ptr<Transport> transport, double timeout_s)
    : transport_(std::move(transport)),
      schedules_(transport_->size()),
      recorder_(Settings::read().flight_records),
      timeout_s_(timeout_s),
      deadlines_(*transport_, timeout_s, Settings::read().longest_wait_s),
      pid_(::getpid()) {
  if (!(timeout_s > 0)) {
    throwInvalidUsage("timeout is " + std::to_string(timeout_s) + " s; give a number above 0");
  }
  const Settings& settings = Settings::get();
  yield_s_ = settings.yield_us * 1e-6;
  liveness_s_ = settings.liveness_s;
  if (settings.deadlocks) deadlocks_.emplace(*transport_);
  wake_ = transport_->waker();
  const bool shared_cores = transport_->oversubscribed();
  spins_ = shared_cores ? 4 : 400;  // some microseconds
  spin_s_ = shared_cores ? 0 : settings.spin_us * 1e-6;
}

World::~World() {
  if (::getpid() == pid_) {
    close("the communicator was destroyed");
    return;
  }
  // A forked child: the threads that are registered with these objects are its parent's, and to
  // destroy a condition variable is to wait for them.
  if (progress_thread_.joinable()) progress_thread_.detach();
  (void)progress_wanted_.release();
  (void)transport_.release();
}

Stats World::stats() {
  refuseInChild();
  std::lock_guard lock(mutex_);
  Stats stats = transport_->stats();
  stats["wait_ns"] = static_cast<uint64_t>(waited_.total() / std::chrono::nanoseconds(1));
  return stats;
}

double World::waitedSeconds(const Ranks& ranks) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  return std::chrono::duration<double>(waited_.of(ranks)).count();
}

std::shared_ptr<std::byte> World::allocate(size_t bytes) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  return transport_->allocate(bytes);
}

void World::throwInChild() const {
  throw Error(ErrorKind::kInvalidUsage,
              "this communicator belongs to process " + std::to_string(pid_) +
                  ", of which process " + std::to_string(::getpid()) +
                  " is a forked child: use it there, or start processes that communicate by spawn",
              {.rank = rank(), .peer = -1, .op = {}, .ranks = {}, .seq = -1});
}

void World::throwUnusable() const {
  const ErrorContext context{.rank = rank(), .peer = -1, .op = {}, .ranks = {}, .seq = -1};
  if (!abort_reason_.empty()) {
    throw Error(ErrorKind::kAborted,
                "this communicator was aborted (" + abort_reason_ + "): make a new one with init()",
                context);
  }
  throw Error(ErrorKind::kInvalidUsage,
              "this communicator is closed: call its operations before close(), or make a new "
              "one with init()",
              context);
}

void World::submit(const std::shared_ptr<Work>& work) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  work->background_ = true;
  enterLocked(*work);
  enqueueLocked(work);
  if (!ended(*work)) {
    ensureProgressThread();
    if (!in_grace_) progress_wanted_->notify_one();
  }
}

// Gives the operation its place in the order of all.
void World::enterLocked(Work& work) {
  if (over()) throwUnusable();
  if (submitter_ != std::this_thread::get_id()) [[unlikely]] {
    several_submitters_ = submitter_ != std::thread::id();
    submitter_ = std::this_thread::get_id();
  }
  work.seq_ = next_seq_++;
  work.takeNumbers(*transport_);
  if (recorder_.on()) work.enter(recorder_);
}

FlightRecorder::Flight World::flight() {
  refuseInChild();
  std::lock_guard lock(mutex_);
  FlightRecorder::Flight flight = recorder_.read();
  for (const auto& work : queue_) {
    if (work->state_ == Work::State::kQueued) {
      FlightRecorder::markQueued(flight, work->flight_);
    }
  }
  return flight;
}

void World::enqueueLocked(const std::shared_ptr<Work>& work) {
  queue_.push_back(work);
  if (work->background_) ++background_works_;
  if (queue_.size() > 1 || advanceLocked()) progressLocked();
}

void World::progressLocked() {
  if (queue_.empty()) return;
  transport_->progress();
  postAllLocked();
}

// Advances until nothing more can be posted: what was posted last may have arrived already, and
// then nothing would wake a sleeper for it.
void World::postAllLocked() {
  while (advanceLocked() && !queue_.empty()) transport_->progress();
}

// Returns true when new requests were posted.
bool World::advanceLocked() {
  struct DropEnded {  // at the end of the pass, also if something is thrown
    World& world;
    bool some = false;
    ~DropEnded() {
      if (some) world.dropEndedLocked();
    }
  } drop{*this};
  bool posted = false;
  for (const auto& each : queue_) {
    Work& work = *each;
    const bool failed = work.failure().has_value();
    // Most operations are like this where there are many: they cost one check each.
    if (work.state_ == Work::State::kPosted && work.underWay() && !failed) continue;
    if (!failed) {
      work.state_ = Work::State::kRunning;
      posted |= work.advance(*transport_);
    }
    if (work.failure()) {
      const Error error = explainedLocked(work, *work.failure());
      fail(work, error);
    } else if (work.complete()) {
      finish(work, Work::State::kDone);
    } else if (!work.allPosted()) {
      break;  // later operations must not overtake its messages
    } else {
      work.state_ = Work::State::kPosted;
    }
    drop.some |= ended(work);
  }
  return posted;
}

// The queue may be the last owner of a work.
void World::dropEndedLocked() {
  std::erase_if(queue_, [this](const std::shared_ptr<Work>& each) { return ended(*each); });
}

void World::finish(Work& work, Work::State state) {
  work.state_ = state;
  recorder_.end(work.flight_, state == Work::State::kDone ? FlightRecord::State::kDone
                                                          : FlightRecord::State::kFailed);
  if (work.background_) --background_works_;
  // A thread that waits for this work may sleep, if another one ended it.
  if (waiters_.load(std::memory_order_relaxed) > 1) wake_();
}

void World::fail(Work& work, const Error& given) {
  // A member of a deadlock that went on after it ended this operation, too, but is not its reason.
  const bool ended_by_peer =
      given.kind() == ErrorKind::kAborted && deadlocks_ && blocking_ != nullptr;
  const Error error =
      (ended_by_peer ? deadlocks_->deadlockFoundByOthers() : std::nullopt).value_or(given);
  ErrorContext context = error.context();
  context.rank = rank();
  context.op = opName(work.call_.op);
  context.ranks = *work.ranks_;
  context.seq = work.seq_;
  work.error_ = Error(error.kind(), error.what(), context);
  work.failed_in_ = heard_.period();
  if (first_cause_.empty() && work.call_.op != OpCode::kResync && !hidesCause(error)) {
    first_cause_ = firstCause(error.what());
  }
  transport_->cancel(&work.completion_);
  transport_->cancel(&work.deferred_);
  for (const Work::Numbers& numbers : work.numbers_) {
    if (!usesPair(work, numbers.peer)) continue;
    transport_->notifyFailure(numbers.peer, *work.error_, work.firstSend(numbers), numbers.send,
                              numbers.recv);
  }
  finish(work, Work::State::kFailed);
}

void World::attach(std::shared_ptr<WorldPart> part) {
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  part_ = std::move(part);
}

std::optional<Error> World::departure(int peer) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  transport_->progress();  // also without operations: the peer may have said goodbye
  progressLocked();
  return transport_->departure(peer);
}

void World::abort(const std::string& reason) {
  refuseInChild();
  if (const auto part = part_) part->abort(reason);
  abortTransport(reason);
}

void World::abortTransport(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (over_.exchange(true, std::memory_order_relaxed)) return;
  abort_reason_ = reason.empty() ? "no reason given" : reason;
  for (const auto& work : queue_) {
    fail(*work, Error(ErrorKind::kAborted,
                      "rank " + std::to_string(rank()) + " aborted: " + abort_reason_));
  }
  dropEndedLocked();
  transport_->progress();
  leaveCountersLocked();
  transport_->close("aborted: " + abort_reason_);
}

// What the others are told who wait for this rank: the reason for closing, and the error before it.
std::string World::reasonForPeersLocked(const std::string& reason) const {
  if (first_cause_.empty() || reason.find(first_cause_) != std::string::npos) return reason;
  return (reason.empty() ? "" : reason + " ") + "after an error: " + first_cause_;
}

void World::close(const std::string& reason) {
  if (::getpid() != pid_) return;  // a forked child: the world is its parent's
  if (const auto part = part_) part->close(reason);
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    over_.store(true, std::memory_order_relaxed);
    // Made before the operations fail by this closing.
    const std::string reason_for_peers = reasonForPeersLocked(reason);
    for (const auto& work : queue_) {
      fail(*work, Error(ErrorKind::kAborted, "rank " + std::to_string(rank()) +
                                                 " closed its communicator during " +
                                                 work->describeCall()));
    }
    dropEndedLocked();
    transport_->progress();
    leaveCountersLocked();
    transport_->close(reason_for_peers);
    stop_ = true;
  }
  progress_wanted_->notify_all();
  if (progress_thread_.joinable()) progress_thread_.join();
}

}  // namespace hdpcomm
