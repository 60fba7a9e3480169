// Hosts that wait for operations of a stream engine.
#include <algorithm>
#include <utility>

#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {
namespace {

// Polls of the board, before a waiting host sleeps between polls.
constexpr int kYields = 1000;
// What is left of a deadline that has passed.
constexpr double kLeastS = 1e-9;

}  // namespace

// A host thread in waitFor(): its deadline, and what others hear of it.
class StreamEngine::HostWait {
 public:
  HostWait(StreamEngine& engine, const StreamWork& work, double timeout_s)
      : engine_(engine), work_(work), by_liveness_(!(timeout_s > 0) && work.by_liveness_) {
    const double limit = timeout_s > 0 ? timeout_s : engine.timeout_s_;
    limit_s_ = std::min(limit, 1e9);
    const std::lock_guard lock(engine_.mutex_);
    told_ = engine_.world_ != nullptr && engine_.world_->tells();
    if (told_) engine_.world_->beginWait();
  }
  ~HostWait() {
    const std::lock_guard lock(engine_.mutex_);
    engine_.waited_.add(work_.ranks_, Clock::now() - start_);
    if (told_ && engine_.world_ != nullptr) engine_.world_->endWait();
  }
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

  const std::optional<Deadlines::Stuck>& stuck() const { return stuck_; }
  double seconds() const { return secondsBetween(start_, Clock::now()); }
  // Seconds until the deadline, which the moves of the awaited ranks put off.
  double left() {
    if (const double seconds = limit_s_ - this->seconds(); seconds > 0) return seconds;
    if (!by_liveness_) return 0;
    const std::lock_guard lock(engine_.mutex_);
    if (engine_.world_ == nullptr) return 0;
    Deadlines::Allowed allowed = engine_.world_->allowed(engine_.calls_.awaitedBy(work_), start_);
    limit_s_ = std::max(limit_s_, secondsBetween(start_, allowed.until));
    stuck_ = std::move(allowed.stuck);
    return std::max(0.0, limit_s_ - this->seconds());
  }

 private:
  StreamEngine& engine_;
  const StreamWork& work_;
  const Clock::time_point start_ = Clock::now();
  const bool by_liveness_;
  bool told_ = false;
  double limit_s_ = 0;
  std::optional<Deadlines::Stuck> stuck_;  // when left() last looked
};

void StreamEngine::waitOn(StreamWork& work, Stream stream) {
  const std::lock_guard lock(mutex_);
  if (work.state_ == StreamWork::State::kFailed) throw *work.error_;
  for (const StreamMover::End& end : work.ends_) device_->wait(stream, *end.event);
}

bool StreamEngine::test(StreamWork& work) {
  const std::lock_guard lock(mutex_);
  if (work.state_ == StreamWork::State::kDone) return true;
  if (work.state_ == StreamWork::State::kRunning) return !work.captured_ && ended(work);
  return drained(work) || (stop_ && settle());
}

bool StreamEngine::failed(const StreamWork& work) const {
  const std::lock_guard lock(mutex_);
  return work.state_ == StreamWork::State::kFailed;
}

// Throws the error of an operation that has failed, when its streams have drained.
void StreamEngine::raiseFailure(StreamWork& work) {
  {
    const std::lock_guard lock(mutex_);
    if (work.state_ != StreamWork::State::kFailed) return;
  }
  awaitDrained(work);
  throw *work.error_;
}

// Only after this, if it returns true, may the buffers of an operation that failed be used again.
bool StreamEngine::awaitDrained(StreamWork& work) {
  const auto start = Clock::now();
  for (const StreamMover::End& end : work.ends_) {
    const double left = drainTimeout() - secondsBetween(start, Clock::now());
    if (left <= 0 || work.stuck_) break;
    try {
      device_->synchronize(*end.event, left);
    } catch (const Error&) {  // the error that led here says more
    }
  }
  const std::lock_guard lock(mutex_);
  work.stuck_ = !drained(work);
  return !work.stuck_;
}

bool StreamEngine::endsWithin(Event event, double seconds, const World::InterruptCheck& check) {
  if (seconds <= 0) return device_->query(event);
  try {
    device_->synchronize(event, seconds, check);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTimeout) throw;
    return false;
  }
}

void StreamEngine::waitFor(const WorkPtr& work, double timeout_s,
                           const World::InterruptCheck& check) {
  if (work->captured_) {
    throwInvalidUsage(
        "an operation that is captured into a graph cannot be waited for on the "
        "host: wait for the graph's replay");
  }
  raiseFailure(*work);
  HostWait wait(*this, *work, timeout_s);
  try {
    for (const StreamMover::End& end : work->ends_) {
      for (bool ended = false; !ended;) {
        ended = endsWithin(*end.event, wait.left(), check);
        if (!ended && wait.left() == 0) {
          throw Error(ErrorKind::kTimeout, "its streams have not ended");
        }
      }
    }
    for (int polls = 0; !conclude(work, polls >= kYields); ++polls) {
      if (wait.left() == 0) throw Error(ErrorKind::kTimeout, "nobody agreed");
      if (polls % kYields == kYields - 1 && check) check();
      polls < kYields ? std::this_thread::yield()
                      : std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return;
  } catch (const Error& error) {
    raiseFailure(*work);
    std::unique_lock lock(mutex_);
    const bool late = error.kind() == ErrorKind::kTimeout;
    failWork(*work, late ? timeoutOf(*work, wait.seconds(), wait.stuck()) : error);
    lock.unlock();
    awaitDrained(*work);
  } catch (...) {  // Ctrl-C
    std::unique_lock lock(mutex_);
    failWork(*work, Error(ErrorKind::kAborted, "rank " + std::to_string(rank_) +
                                                   " was interrupted in " + describe(work->call_)));
    lock.unlock();
    awaitDrained(*work);
    throw;
  }
  const std::lock_guard lock(mutex_);
  throw work->error_ ? *work->error_ : work->withContext(*failed_);
}

// The operation's streams have finished. Returns whether the peers called the same operation, too:
// for a host that waits, a send ends only when the receiver has accepted its call. `check_lives`:
// also look for members whose process has ended, which the board does not tell.
bool StreamEngine::conclude(const WorkPtr& work, bool check_lives) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  // Read before the entries: a member that is gone has posted all of its entries before.
  std::vector<bool> gone;
  for (const StreamWork::Share& share : work->shares_) {
    gone.push_back(calls_.gone(share.peer, check_lives, now));
  }
  compareCalls();
  bool agreed = true;
  for (size_t i = 0; i < work->shares_.size(); ++i) {
    const StreamWork::Share& share = work->shares_[i];
    if (work->state_ != StreamWork::State::kRunning || failed_) break;
    const bool heard = calls_.heard(share);
    if (gone[i] && !(calls_.hasPosted(share) && heard)) {
      failWork(*work, calls_.goneError(*work, share));
    }
    agreed = agreed && heard;
    // The peer's entry may come later than its message. Only this peer's counts here: a member that
    // did its part may leave while another's entry is still on its way.
    if (calls_.awaits(*work, share.peer)) {
      agreed = false;
      if (gone[i]) failWork(*work, calls_.goneError(*work, share));
    }
  }
  if (work->state_ == StreamWork::State::kFailed) throw *work->error_;
  if (!agreed) return false;
  end(*work, StreamWork::State::kDone);
  std::erase(running_, work);
  return true;
}

void StreamEngine::waitForAll(double timeout_s, const World::InterruptCheck& check) {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard lock(mutex_);
    if (failed_ && !closed_) throw *failed_;
    checkUsable();
    works = running_;
  }
  const auto start = Clock::now();
  const double limit = timeout_s > 0 ? timeout_s : timeout_s_;
  for (const WorkPtr& work : works) {
    const bool by_liveness = !(timeout_s > 0) && work->by_liveness_;
    const double left = limit - secondsBetween(start, Clock::now());
    waitFor(work, by_liveness ? 0 : std::max(kLeastS, left), check);
  }
}

}  // namespace hdpcomm
