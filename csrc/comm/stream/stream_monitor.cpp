// When the checks that streams cannot make are made, and what happens when one of them fails.
#include <algorithm>
#include <map>
#include <set>

#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {
namespace {

constexpr auto kWatchInterval = PeerCalls::kLookInterval;
}  // namespace

void StreamEngine::compareCalls() {
  if (failed_) return;
  if (const auto failure = calls_.compare()) failWork(*failure->work, failure->error);
}

// As an Error; exceptions of other types (no memory, no thread) become internal ones.
Error StreamEngine::errorOf(const std::exception& failure) const {
  if (const auto* error = dynamic_cast<const Error*>(&failure)) return *error;
  return Error(ErrorKind::kInternal,
               "rank " + std::to_string(rank_) +
                   " could not go on with its device operations: " + failure.what());
}

// A device that has failed throws on every call; the work that it held never ends well.
bool StreamEngine::ended(const StreamWork& work) const {
  if (!work.submitted_ || device_lost_) return false;
  try {
    return std::all_of(work.ends_.begin(), work.ends_.end(),
                       [&](const StreamMover::End& end) { return device_->query(*end.event); });
  } catch (const Error&) {
    device_lost_ = true;
    return false;
  }
}

// What a stream reached, it reached in order: a few events tell how far each stream is.
void StreamEngine::collectEnded() {
  std::map<uintptr_t, std::vector<const Event*>> ends;  // by stream
  for (const WorkPtr& work : running_) {
    for (const StreamMover::End& end : work->ends_) {
      ends[end.stream.handle].push_back(end.event.get());
    }
  }
  std::set<const Event*> reached;
  try {
    for (const auto& [stream, events] : ends) {
      const auto first_left = std::partition_point(
          events.begin(), events.end(), [&](const Event* event) { return device_->query(*event); });
      reached.insert(events.begin(), first_left);
    }
  } catch (const Error&) {
    device_lost_ = true;
    return;
  }
  std::erase_if(running_, [&](const WorkPtr& work) {
    // A closed engine compares no more calls: that the messages came has to be enough.
    const bool compared = work->uncompared_ == 0 || closed_;
    const bool over = work->submitted_ && std::ranges::all_of(work->ends_, [&](const auto& end) {
                        return reached.contains(end.event.get());
                      });
    if (work->state_ != StreamWork::State::kRunning || !compared || !over) return false;
    end(*work, StreamWork::State::kDone);
    return true;
  });
}

std::optional<Error> StreamEngine::checkWork(StreamWork& work, Clock::time_point now) {
  if (std::optional<Error> loss = calls_.lossError(work, now)) return loss;
  if (work.started_) return checkDeadline(work, *work.started_, now);
  if (device_->query(*work.begin_)) work.started_ = now;
  return std::nullopt;
}

// Fails the operation, whatever its streams did, and the engine with it.
void StreamEngine::failWork(StreamWork& work, const Error& error) {
  if (failed_) return;
  work.error_ = work.withContext(error);
  end(work, StreamWork::State::kFailed);
  fail(*work.error_);
}

// Ends every running operation with the error; the watcher then sets the flags that their streams
// wait for. The peers hear of it first, so that they do not take what these streams then write for
// messages.
void StreamEngine::fail(const Error& error) {
  if (failed_) return;
  collectEnded();
  failed_ = error;
  has_failed_ = true;
  release_due_ = true;
  const std::vector<uint64_t> valid_posts = calls_.validPosts(running_);
  for (const WorkPtr& work : running_) {
    end(*work, StreamWork::State::kFailed);
    if (!work->error_) work->error_ = work->withContext(error);
  }
  board_->fail(rank_, error, valid_posts);
  released_.swap(running_);
  calls_.forgetExpected();
  reportMoves();
  wake_.notify_all();
}

// Returns whether all released operations have ended. Calls the mover's release() at least once,
// since the mover may have work under way that belongs to no running operation.
bool StreamEngine::releaseOnce() {
  std::erase_if(released_, [&](const WorkPtr& work) { return drained(*work); });
  if (released_.empty() && (!release_due_ || device_lost_)) return true;
  if (device_lost_) return false;  // what runs at this moment ends by itself
  release_due_ = false;
  mover_->release(control_stream_.get());
  device_->synchronize(control_stream_.get(), drainTimeout());
  return false;
}

// What a mover calls while it waits on the host in the middle of an operation.
StreamMover::WaitCheck StreamEngine::waitCheckOf(StreamWork& work) {
  return [this, &work, start = Clock::now()] {
    compareCalls();
    if (failed_) throw work.error_ ? *work.error_ : *failed_;
    const auto now = Clock::now();
    if (const std::optional<Error> loss = calls_.lossError(work, now)) throw *loss;
    if (const std::optional<Error> late = checkDeadline(work, start, now)) throw *late;
    reportMoves();
  };
}

void StreamEngine::checkHealth() {
  if (failed_) {
    releaseOnce();
    return;
  }
  compareCalls();
  reportMoves();
  try {
    mover_->checkHealth();
  } catch (const Error& error) {  // the mover has failed; the device itself goes on
    fail(error);
    return;
  }
  const auto now = Clock::now();
  for (const WorkPtr& work : std::vector<WorkPtr>(running_)) {
    if (failed_ || !work->submitted_) return;
    if (ended(*work)) continue;
    if (const std::optional<Error> error = checkWork(*work, now)) failWork(*work, *error);
  }
}

std::optional<std::string> StreamEngine::lost() {
  if (has_failed_) return "its device operations have failed";
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_ && board_->lost(rank)) {
      return "rank " + std::to_string(rank) + " has failed or died";
    }
  }
  return std::nullopt;
}

void StreamEngine::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, releasing() ? kReleaseInterval : kWatchInterval);
    if (stop_) return;
    guard_.beat();
    try {
      checkHealth();
    } catch (const std::exception& failure) {
      const Error error = errorOf(failure);
      device_lost_ = device_lost_ || deviceLost();
      fail(error);
    }
  }
}

}  // namespace hdpcomm
