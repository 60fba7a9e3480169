// What waits in a World: the caller's thread, and the thread that moves background works.
#include <sched.h>

#include <algorithm>

#include "comm/host/world.hpp"
#include "transport/failures.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define HDP_PAUSE() _mm_pause()
#else
#define HDP_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

namespace hdpcomm {
namespace {

// A caller that starts an operation in the background mostly comes back at once to wait for it: to
// wake a thread for each would cost more than a short message does.
constexpr auto kGrace = std::chrono::microseconds(500);

// How long the progress thread sleeps where it has nothing to move.
constexpr auto kNap = std::chrono::milliseconds(100);

constexpr double kLongestS = 1e9;  // what a clock of nanoseconds can hold, and some

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

// Fails an operation whose peer sends where it should receive: two ranks that both send (each a
// root, say) would wait for each other until the deadline.
void World::rejectUnexpectedLocked() {
  if (queue_.empty() || !queue_.front()->allPosted()) return;
  Work& work = *queue_.front();
  for (const Work::Numbers& numbers : work.numbers_) {
    if (numbers.recv)
      transport_->rejectUnexpected(numbers.peer, *numbers.recv, work.call_, &work.completion_);
  }
}

// Also asks about peers with which no request is under way at the moment (a third rank is awaited,
// say): they may have given up, too.
void World::pollFailuresLocked() {
  for (const auto& work : queue_) {
    for (const Work::Numbers& numbers : work->numbers_) {
      if (work->failure() || numbers.peer == rank()) continue;
      const auto lost =
          transport_->lost(numbers.peer, numbers.send, numbers.recv, work->willNeed(numbers.peer));
      // Where it is the first to receive what the peer has told, that has failed the work
      // meanwhile.
      if (lost && !work->failure()) work->completion_.failure = lost;
    }
  }
}

// Gives up operations that nobody waits for and that have run too long. Their time starts when a
// health check first finds them running, so that a message that goes well never reads the clock.
void World::giveUpLateLocked(Clock::time_point now) {
  const auto timeout = nanoseconds(std::min(timeout_s_, kLongestS));
  for (const auto& work : queue_) {
    if (!work->background_ || work->state_ == Work::State::kQueued || ended(*work)) continue;
    if (!work->seen_) work->seen_ = now;
    if (now < std::max(*work->seen_ + timeout, work->allowed_)) continue;
    std::optional<Deadlines::Stuck> stuck;
    if (goesByLiveness()) {
      const Deadlines::Allowed allowed =
          deadlines_.allowed(awaitedLocked(*work), *work->seen_, lastOperationLocked(), now);
      work->allowed_ = std::max(work->allowed_, allowed.until);
      stuck = allowed.stuck;
    }
    if (now >= work->allowed_) fail(*work, timeoutError(*work, now - *work->seen_, stuck));
  }
  dropEndedLocked();
}

// Periodic health check, run by any waiting thread a few times a second.
void World::checkHealthLocked(Clock::time_point now) {
  if (deadlocks_) deadlocks_->begin();
  transport_->checkPeers();
  rejectUnexpectedLocked();
  pollFailuresLocked();
  progressLocked();
  giveUpLateLocked(now);
  progressLocked();
  if (!deadlocks_) return;
  if (const auto deadlock = deadlocks_->end(waitRecordLocked())) {
    for (const auto& work : queue_) {
      if (!ended(*work)) fail(*work, *deadlock);
    }
    dropEndedLocked();
  }
}

// What keeps this rank from going on; nothing, where that is not certain: another thread may submit
// operations, and resync() brings the peers to an error.
WaitRecord World::waitRecordLocked() {
  WaitRecord record{};
  if (blocking_ == nullptr || ended(*blocking_) || several_submitters_) return record;
  for (const auto& work : queue_) {
    if (record.num_works == WaitRecord::kWorks || work->state_ == Work::State::kQueued ||
        work->failure() || work->call_.op == OpCode::kResync) {
      return {};
    }
    // A step's own requests end before the next step is posted.
    const bool step = work->completion_.pending > 0;
    const auto awaited = transport_->awaited(step ? &work->completion_ : &work->deferred_);
    if (awaited.empty()) return {};
    WaitingWork& waiting = record.works[record.num_works++];
    waiting.call = work->call_;
    for (const Work::Numbers& numbers : work->numbers_) {
      waiting.sends |= numbers.send.has_value() ? 1 : 0;
      waiting.receives |= numbers.recv.has_value() ? 1 : 0;
    }
    waiting.num_awaited =
        static_cast<int16_t>(std::min<size_t>(awaited.size(), WaitingWork::kRanks));
    std::copy_n(awaited.begin(), waiting.num_awaited, waiting.awaited);
    if (!work->allPosted()) break;  // later operations wait for it
  }
  uint64_t& signature = record.signature;
  const auto mix = [&signature](uint64_t value) {
    signature = (signature ^ value) * 0x9e3779b97f4a7c15ULL;
    signature ^= signature >> 32;
  };
  mix(static_cast<uint64_t>(next_seq_));
  mix(static_cast<uint64_t>(blocking_->seq_));
  for (const auto& [name, count] : transport_->stats()) mix(count);
  return record;
}

Error World::timeoutError(const Work& work, Clock::duration waited,
                          const std::optional<Deadlines::Stuck>& stuck) {
  std::vector<int> awaited = transport_->awaited(&work.completion_);
  for (const int peer : transport_->awaited(&work.deferred_)) awaited.push_back(peer);
  std::sort(awaited.begin(), awaited.end());
  awaited.erase(std::unique(awaited.begin(), awaited.end()), awaited.end());
  std::string text = "rank " + std::to_string(rank()) + " waited " +
                     std::to_string(std::chrono::duration<double>(waited).count()) + " s in " +
                     work.describeCall() + " (ranks " + listOf(*work.ranks_) + ")";
  if (!awaited.empty()) {
    text += " for rank" + std::string(awaited.size() > 1 ? "s " : " ") + listOf(awaited);
  } else if (work.state_ == Work::State::kQueued) {
    text += " behind operations that have not ended";
  }
  text += ": " + (stuck ? stuck->text : "look for a rank that did not call it, or raise timeout=");
  return Error(ErrorKind::kTimeout, text,
               {.rank = rank(),
                .peer = stuck                 ? stuck->rank
                        : awaited.size() == 1 ? awaited[0]
                                              : -1,
                .op = {},
                .ranks = {},
                .seq = -1});
}

bool World::heard(const Work& work) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  return work.state_ == Work::State::kFailed && heard_.has(*work.error_, work.failed_in_);
}

bool World::test(Work& work) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (!ended(work)) progressLocked();
  return ended(work);
}

void World::wait(Work& work, double timeout_s, const InterruptCheck& check_interrupt) {
  refuseInChild();
  {
    std::lock_guard lock(mutex_);
    if (spinLocked(work)) return;
  }
  waitSlowly(work, timeout_s, check_interrupt);
}

void World::run(Work& work, double timeout_s, const InterruptCheck& check_interrupt) {
  refuseInChild();
  {
    std::lock_guard lock(mutex_);
    enterLocked(work);
    try {
      if (queue_.empty() && runAloneLocked(work)) return;
      // Owned by the caller: the queue lets go of it before this function returns or throws.
      enqueueLocked(std::shared_ptr<Work>(std::shared_ptr<void>(), &work));
      if (spinLocked(work)) return;
    } catch (...) {
      forgetLocked(work);
      throw;
    }
  }
  try {
    waitSlowly(work, timeout_s, check_interrupt);
  } catch (...) {
    std::lock_guard lock(mutex_);
    forgetLocked(work);
    throw;
  }
}

void World::resync(const Call& call, const Ranks& ranks, double timeout_s,
                   const InterruptCheck& check_interrupt, bool quiet) {
  const auto work = std::make_shared<ResyncWork>(call, ranks);
  if (quiet) {
    work->keepQuiet();
    work->keepOn();
  }
  {
    std::lock_guard lock(mutex_);
    if (over()) throwUnusable();
    const std::string cause = causeOfResyncLocked(*ranks);
    const Error error =
        calledResync(rank(), cause, {.rank = rank(), .peer = -1, .op = {}, .ranks = {}, .seq = -1});
    failAllWithLocked(*ranks, error);
    for (const int peer : *ranks) {
      // Before the marker, which would end the peer's operations without a reason.
      if (!cause.empty() && peer != rank()) transport_->notifyFailure(peer, error, {}, {}, {});
    }
    enterLocked(*work);
    enqueueLocked(work);
  }
  try {
    waitSlowly(*work, timeout_s, check_interrupt);
  } catch (...) {
    std::lock_guard lock(mutex_);
    forgetLocked(*work);
    throw;
  }
  std::lock_guard lock(mutex_);
  for (int peer = 0; peer < size(); ++peer) {
    if (transport_->outOfStep(peer)) return;
  }
  first_cause_.clear();
  heard_.beginPeriod();
}

// The first error that this rank has met, or that a rank has told it of; empty if there is none.
std::string World::causeOfResyncLocked(const std::vector<int>& ranks) {
  for (const auto& work : queue_) {
    if (work->failure() && !hidesCause(*work->failure())) {
      return firstCause(work->failure()->what());
    }
  }
  if (!first_cause_.empty()) return first_cause_;
  for (const int peer : ranks) {
    transport_->lost(peer, {}, {}, false);  // receives what the peer has told
    const auto error = transport_->outOfStep(peer);
    if (error && !hidesCause(*error)) return firstCause(error->what());
  }
  return "";
}

// An operation that fails since a peer called resync() asks the other peers: the reason for that
// may have arrived from one of them, or may have been told before.
Error World::explainedLocked(const Work& work, const Error& error) {
  if (!hidesCause(error)) return error;
  for (const Work::Numbers& numbers : work.numbers_) {
    if (numbers.peer == rank()) continue;
    const auto other = transport_->lost(numbers.peer, numbers.send, numbers.recv, true);
    if (other && !hidesCause(*other)) return *other;
  }
  return error;
}

// Fails the operations that use the pairs of this rank with the given ones. A resync() of another
// thread stays: they run one after the other.
void World::failAllWithLocked(const std::vector<int>& ranks, const Error& error) {
  for (const auto& work : queue_) {
    if (ended(*work) || work->call_.op == OpCode::kResync) continue;
    const bool concerned =
        std::any_of(work->numbers_.begin(), work->numbers_.end(), [&](const Work::Numbers& each) {
          return usesPair(*work, each.peer) &&
                 std::find(ranks.begin(), ranks.end(), each.peer) != ranks.end();
        });
    if (concerned) fail(*work, work->failure().value_or(error));
  }
  dropEndedLocked();
}

// After this neither this rank nor a peer touches the work.
void World::forgetLocked(Work& work) {
  if (ended(work)) return;
  fail(work, Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + " gave up " +
                                             work.describeCall() + " after an internal error"));
  dropEndedLocked();
}

// The common case: nothing else is under way, so the work needs no place in the queue and never
// reads the clock. False: the work has failed, or is not complete yet.
bool World::runAloneLocked(Work& work) {
  work.state_ = Work::State::kRunning;
  for (int polls = spins_; polls > 0;) {
    work.advance(*transport_);
    if (work.failure()) return false;
    if (work.complete()) {
      work.state_ = Work::State::kDone;
      recorder_.end(work.flight_, FlightRecord::State::kDone);
      return true;
    }
    while (--polls > 0 && !transport_->progress()) {
    }
  }
  return false;
}

// The same for a work in the queue. Throws its error.
bool World::spinLocked(Work& work) {
  for (int i = 0; i < spins_ && !ended(work); ++i) {
    if (transport_->progress()) postAllLocked();
  }
  if (work.state_ == Work::State::kFailed) throwFailureLocked(work);
  return work.state_ == Work::State::kDone;
}

void World::throwFailureLocked(const Work& work) {
  if (!work.quiet_) heard_.add(*work.error_, work.failed_in_);
  throw *work.error_;
}

void World::waitSlowly(Work& work, double timeout_s, const InterruptCheck& check_interrupt) {
  const bool by_liveness = !(timeout_s > 0);
  if (by_liveness) timeout_s = timeout_s_;
  const auto start = Clock::now();
  const auto deadline = start + nanoseconds(std::min(timeout_s, kLongestS));
  waiters_.fetch_add(1, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    several_submitters_ |= blocking_ != nullptr || submitter_ != std::this_thread::get_id();
    blocking_ = &work;
    deadlines_.moves().beginWait();
  }
  try {
    waitSlowly(work, start, deadline, by_liveness, check_interrupt);
  } catch (...) {
    std::lock_guard lock(mutex_);
    stopWaitingLocked(work, start);
    throw;
  }
  std::lock_guard lock(mutex_);
  stopWaitingLocked(work, start);
  if (work.state_ == Work::State::kFailed) throwFailureLocked(work);
}

// Under the lock, so that the progress thread does not miss it between its check and its sleep.
void World::stopWaitingLocked(const Work& work, Clock::time_point start) {
  const auto now = Clock::now();
  deadlines_.moves().endWait(now);
  waited_.add(work.ranks(), now - start);
  blocking_ = nullptr;
  waiters_.fetch_sub(1, std::memory_order_relaxed);
  if (background_works_ > 0 && !in_grace_) progress_wanted_->notify_one();
}

// Spins, yields, then sleeps on the futex; between sleeps checks the deadline, the peers and
// Ctrl-C.
void World::waitSlowly(Work& work, Clock::time_point start, Clock::time_point deadline,
                       bool by_liveness, const InterruptCheck& check) {
  const auto spin_until = start + nanoseconds(spin_s_);
  const auto yield_until = spin_until + nanoseconds(yield_s_);
  const auto liveness = nanoseconds(liveness_s_);
  auto next_check = start + liveness;
  const auto step = [&] {
    std::lock_guard lock(mutex_);
    progressLocked();
    return ended(work);
  };
  if (work.background_) {
    std::lock_guard lock(mutex_);
    work.allowed_ = std::max(work.allowed_, deadline);
  }
  for (;;) {
    if (step()) return;
    const auto now = Clock::now();
    if (now < spin_until) {
      HDP_PAUSE();
      continue;
    }
    if (now < yield_until) {
      ::sched_yield();
      continue;
    }
    if (now >= next_check) {
      next_check = now + liveness;
      {
        std::lock_guard lock(mutex_);
        checkHealthLocked(now);
        if (ended(work)) return;
        std::optional<Deadlines::Stuck> stuck;
        if (by_liveness && now >= deadline && goesByLiveness()) {
          const Deadlines::Allowed allowed =
              deadlines_.allowed(awaitedLocked(work), start, lastOperationLocked(), now);
          deadline = std::max(deadline, allowed.until);
          stuck = allowed.stuck;
        }
        if (now >= deadline) {
          fail(work, timeoutError(work, now - start, stuck));
          dropEndedLocked();
          progressLocked();  // ends the operations that fail with it
          return;
        }
      }
      try {
        if (check) check();
      } catch (...) {
        std::lock_guard lock(mutex_);
        if (!ended(work)) {
          fail(work, Error(ErrorKind::kAborted, "rank " + std::to_string(rank()) +
                                                    " was interrupted in " + work.describeCall()));
          dropEndedLocked();
        }
        throw;
      }
    }
    const uint32_t ticket = transport_->idleTicket();
    const bool over = step();
    transport_->idle(ticket, over ? now : std::min(next_check, std::max(deadline, now)));
    if (over) return;
    if (Clock::now() >= deadline) next_check = Clock::now();
  }
}

void World::ensureProgressThread() {
  if (progress_thread_.joinable()) return;
  progress_thread_ = std::thread([this] {
    try {
      progressLoop();
    } catch (const std::exception& error) {  // no memory, say: the works end, the process does not
      try {
        abortTransport("its background thread failed: " + std::string(error.what()));
      } catch (const std::exception&) {  // the works end by their deadlines
      }
    }
  });
}

// Moves background works while no thread waits (one that waits does so itself), and always checks
// their health: many short waits in a row may each end before their own first check.
void World::progressLoop() {
  const auto liveness = nanoseconds(liveness_s_);
  auto next_check = Clock::now() + liveness;
  auto next_pulse = next_check;
  int64_t graced = 0;      // operations before this one have had their time
  bool attending = false;  // no operation has any more until somebody waits again
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const auto now = Clock::now();
    if (background_works_ > 0 && now >= next_check) {
      next_check = now + liveness;
      checkHealthLocked(now);
    }
    if (tells() && now >= next_pulse) {
      next_pulse = now + liveness;
      publishPulseLocked(now);
    }
    if (background_works_ == 0 || waiters_.load(std::memory_order_relaxed) > 0) {
      attending = false;
      progress_wanted_->wait_for(lock, std::min<Clock::duration>(liveness, kNap));
      continue;
    }
    if (!attending && queue_.front()->seq_ >= graced) {
      const int64_t next = next_seq_;
      in_grace_ = true;
      progress_wanted_->wait_for(lock, kGrace);
      in_grace_ = false;
      graced = next;
      continue;
    }
    attending = true;
    lock.unlock();
    const uint32_t ticket = transport_->idleTicket();
    lock.lock();
    progressLocked();
    const bool idle = background_works_ > 0 && !stop_;
    lock.unlock();
    transport_->idle(ticket, idle ? Clock::now() + std::chrono::milliseconds(50) : Clock::now());
    lock.lock();
  }
}

}  // namespace hdpcomm
