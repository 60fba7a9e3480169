// How a stream engine ends: its streams drain before any memory that they use is freed.
#include <utility>
#include <vector>

#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {
namespace {

struct UndrainedEngines {
  std::mutex mutex;
  std::vector<StreamEngine*> list;
};

// Never destroyed: at the end of the process the streams of these engines may still run.
UndrainedEngines& undrainedEngines() {
  static UndrainedEngines* const instance = new UndrainedEngines;
  return *instance;
}

}  // namespace

bool StreamEngine::deviceLost() const {
  try {
    device_->query(probe_.get());
    return false;
  } catch (const Error&) {
    return true;
  }
}

// Whether no stream uses the operation's buffers any more: what was enqueued of it has ended, or
// the device has failed and runs nothing more.
bool StreamEngine::drained(const StreamWork& work) const {
  if (!work.submitted_) return true;
  for (const StreamMover::End& end : work.ends_) {
    try {
      if (!device_->query(*end.event)) return false;
    } catch (const Error&) {
      device_lost_ = true;
    }
  }
  return !work.ends_missing_ || deviceLost();
}

// Called after close(), under the lock. Gives up the mover's memory once all streams have drained,
// and returns whether they have; until then nobody else sets the flags that they wait for.
bool StreamEngine::settle() {
  if (retired_) return true;
  std::erase_if(released_, [&](const WorkPtr& work) { return drained(*work); });
  if (!device_lost_ && (release_due_ || !released_.empty())) {
    try {
      mover_->release(control_stream_.get());
      release_due_ = false;
    } catch (const std::exception&) {
      device_lost_ = deviceLost();
    }
  }
  if (!released_.empty()) return false;
  if (device_lost_) mover_->deviceLost();
  mover_->retire();
  retired_ = true;
  return true;
}

void StreamEngine::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    fail(Error(ErrorKind::kAborted, "rank " + std::to_string(rank_) + " aborted: " +
                                        (reason.empty() ? "no reason given" : reason)));
  }
  close("aborted: " + reason);
}

void StreamEngine::close(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (std::exchange(closed_, true)) return;
  // On a GPU the host is ahead of its streams, and the work that they still hold is meant to run.
  const auto limit = Clock::now() + (reason.empty() && !device_->isSim() ? std::chrono::seconds(5)
                                                                         : std::chrono::seconds(0));
  compareCalls();
  collectEnded();
  while (!running_.empty() && Clock::now() < limit) {
    wake_.wait_for(lock, kReleaseInterval);
    collectEnded();
  }
  if (!running_.empty()) {
    fail(Error(ErrorKind::kAborted, "rank " + std::to_string(rank_) +
                                        " closed its communicator during " +
                                        describe(running_.front()->call_)));
  }
  board_->leave(rank_, reason, calls_.validPosts({}));
  const auto drained_by = Clock::now() + std::chrono::duration<double>(drainTimeout());
  try {
    while (!releaseOnce() && Clock::now() < drained_by) wake_.wait_for(lock, kReleaseInterval);
  } catch (const std::exception&) {  // those who waited got the error
    device_lost_ = device_lost_ || deviceLost();
  }
  stop_ = true;
  lock.unlock();
  wake_.notify_all();
  watcher_.join();
  guard_.stop();
  lock.lock();
  reportMoves();
  world_ = nullptr;
  settle();
}

void StreamEngine::endEngine(StreamEngine* engine) {
  try {
    engine->close("the communicator was destroyed");
  } catch (const std::exception&) {  // then it is not settled
  }
  {
    const std::lock_guard lock(undrainedEngines().mutex);
    undrainedEngines().list.push_back(engine);
  }
  freeUndrained();
}

void StreamEngine::freeUndrained() {
  std::vector<std::unique_ptr<StreamEngine>> drained;
  const std::lock_guard lock(undrainedEngines().mutex);
  std::erase_if(undrainedEngines().list, [&](StreamEngine* engine) {
    const std::lock_guard engine_lock(engine->mutex_);
    if (!engine->stop_ || !engine->settle()) return false;
    drained.emplace_back(engine);
    return true;
  });
}

}  // namespace hdpcomm
