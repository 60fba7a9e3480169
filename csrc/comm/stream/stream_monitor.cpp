// The checks that streams cannot make: whether both sides called the same, whether the peers live,
// the deadline; and what happens when one of them fails.
#include <algorithm>
#include <map>
#include <set>

#include "comm/stream/stream_engine.hpp"
#include "transport/failures.hpp"

namespace hdpcomm {
namespace {

using device::BoardState;
using device::CallEntry;
using std::chrono::milliseconds;

constexpr auto kWatchInterval = milliseconds(50);
// Time for messages that a lost peer has already sent.
constexpr auto kLossGrace = milliseconds(300);
// A rank may close because another one failed: time for the notice of that failure.
constexpr auto kNoticeGrace = milliseconds(120);
// Time for the others' part of an operation in which a member that left has done its own.
constexpr auto kLeaveGrace = milliseconds(2000);

std::string detailsOf(const CallEntry& entry) {
  std::string text;
  if (entry.landing != StreamEngine::kNoLanding) {
    text += " (landing at " + std::to_string(entry.landing) + ")";
  }
  if (entry.captured != 0) text += " (captured into a graph)";
  if (entry.together != 0) {
    text += " (one of " + std::to_string(entry.together >> 32) + " puts one way and " +
            std::to_string(entry.together & 0xffffffff) + " the other in one exchange)";
  }
  return text;
}

}  // namespace

// A captured operation is not among the running ones, which hear of a failed peer by lossOf(). The
// entry of a peer that failed first never comes.
void StreamEngine::failCaptured(int rank) {
  const WorkPtr work = peers_[static_cast<size_t>(rank)].expected.front().work;
  if (!work->captured_ || board_->state(rank) != BoardState::kFailed) return;
  for (const StreamWork::Share& share : work->shares_) {
    if (share.peer != rank) continue;
    if (const auto error = departureError(*work, share)) failWork(*work, *error);
    return;
  }
}

// The n-th entry of a pair on one side is the n-th on the other.
void StreamEngine::compareCalls() {
  for (int rank = 0; rank < num_ranks_ && !failed_; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.unposted.empty() && board_->post(rank_, rank, peer.unposted.front())) {
      peer.unposted.pop_front();
    }
    while (!peer.expected.empty()) {
      const std::optional<CallEntry> theirs = board_->take(rank, rank_);
      if (!theirs) {
        failCaptured(rank);
        break;
      }
      const Expected ours = std::move(peer.expected.front());
      peer.expected.pop_front();
      if (*theirs == ours.entry) {
        board_->accept(rank, rank_);
        --ours.work->uncompared_;
        continue;
      }
      failWork(
          *ours.work,
          Error(ErrorKind::kMismatch,
                "rank " + std::to_string(rank_) + " called " + describe(ours.entry.call) +
                    detailsOf(ours.entry) + " and expected " + std::to_string(ours.entry.bytes) +
                    " bytes, but rank " + std::to_string(rank) + " called " +
                    describe(theirs->call) + detailsOf(*theirs) + " and sent " +
                    std::to_string(theirs->bytes) +
                    " bytes: call the same operations with the same arguments in the same order",
                {.rank = rank_, .peer = rank, .op = {}, .ranks = {}, .seq = -1}));
      return;
    }
  }
}

Error StreamEngine::withContext(const Error& error, const StreamWork& work) const {
  ErrorContext context = error.context();
  context.rank = rank_;
  context.op = opName(work.call_.op);
  context.ranks = *work.ranks_;
  context.seq = work.seq_;
  return Error(error.kind(), error.what(), context);
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

// The error of an operation for which a member that has failed or left did not do its part; none if
// the member is there.
std::optional<Error> StreamEngine::departureError(const StreamWork& work,
                                                  const StreamWork::Share& share) const {
  const BoardState state = board_->state(share.peer);
  if (share.peer == rank_ || state == BoardState::kReady) return std::nullopt;
  const Error last = board_->lastError(share.peer);
  std::string text = last.what();
  ErrorContext context = last.context();
  context.peer = share.peer;
  if (state == BoardState::kClosed) {
    text += " while rank " + std::to_string(rank_) + " waited for it in " + describe(work.call_);
  } else if (context.rank != rank_ && text.find(kToldBy) == std::string::npos) {
    text += kToldBy + std::to_string(share.peer) + ")";
  }
  return withContext(Error(last.kind(), text, context), work);
}

// The member that is gone and whose last error says most: a failure before a close, a failure that
// the rank found by itself before one that it was told of, a close with a reason before one
// without. Among equals `found`.
const StreamWork::Share& StreamEngine::mostInformative(const StreamWork& work,
                                                       const StreamWork::Share& found) const {
  const auto rating = [this](const StreamWork::Share& share) {
    const BoardState state = share.peer == rank_ ? BoardState::kReady : board_->state(share.peer);
    if (state != BoardState::kFailed && state != BoardState::kClosed) return 4;
    const std::string text = board_->lastError(share.peer).what();
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    if (state == BoardState::kFailed) return says(kToldBy) ? 1 : 0;
    return says("last words") ? 2 : 3;
  };
  const StreamWork::Share* best = &found;
  for (const StreamWork::Share& share : work.shares_) {
    if (rating(share) < rating(*best)) best = &share;
  }
  return *best;
}

// The error of an operation that needs more from a member that has failed, left or died.
Error StreamEngine::goneError(const StreamWork& work, const StreamWork::Share& share) const {
  if (board_->state(share.peer) != BoardState::kReady) {
    return *departureError(work, mostInformative(work, share));
  }
  return withContext(Error(ErrorKind::kPeerLost,
                           "rank " + std::to_string(share.peer) + " died while rank " +
                               std::to_string(rank_) + " waited for it in " + describe(work.call_),
                           {.rank = rank_, .peer = share.peer, .op = {}, .ranks = {}, .seq = -1}),
                     work);
}

bool StreamEngine::hasPosted(const StreamWork::Share& share) const {
  return board_->state(share.peer) == BoardState::kReady ||
         share.expected <= board_->validPosts(share.peer, rank_);
}

// Asks the board at most once in an interval of the watcher, since the board reads /proc for a
// process of this host.
bool StreamEngine::lives(int rank, Clock::time_point now) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.lives && now - peer.lives_checked >= kWatchInterval) {
    peer.lives_checked = now;
    peer.lives = board_->processAlive(rank);
  }
  return peer.lives;
}

// The error of an operation that can no longer end, since a member left, failed or died before it
// had done its part.
std::optional<Error> StreamEngine::lossOf(StreamWork& work, Clock::time_point now) {
  for (const StreamWork::Share& share : work.shares_) {
    if (share.peer == rank_) continue;
    const bool announced = board_->state(share.peer) != BoardState::kReady;
    if (!announced && lives(share.peer, now)) continue;
    if (!work.loss_seen_) work.loss_seen_ = now;
    // Its part may still be under way.
    const bool left = board_->state(share.peer) == BoardState::kClosed;
    const auto grace = hasPosted(share) ? (left ? kLeaveGrace : kLossGrace)
                                        : (left ? kNoticeGrace : milliseconds(0));
    if (now - *work.loss_seen_ < grace) continue;
    return goneError(work, share);
  }
  return std::nullopt;
}

std::optional<Error> StreamEngine::checkWork(StreamWork& work, Clock::time_point now) {
  if (std::optional<Error> loss = lossOf(work, now)) return loss;
  if (work.started_) return checkDeadline(work, *work.started_, now);
  if (device_->query(*work.begin_)) work.started_ = now;
  return std::nullopt;
}

// Fails the operation, whatever its streams did, and the engine with it.
void StreamEngine::failWork(StreamWork& work, const Error& error) {
  if (failed_) return;
  work.error_ = withContext(error, work);
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
  std::vector<uint64_t> valid_posts;
  for (const Peer& peer : peers_) valid_posts.push_back(peer.num_posted);
  for (const WorkPtr& work : running_) {
    for (const StreamWork::Share& share : work->shares_) {
      uint64_t& limit = valid_posts[static_cast<size_t>(share.peer)];
      if (share.posts > 0) limit = std::min(limit, share.posted);
    }
    end(*work, StreamWork::State::kFailed);
    if (!work->error_) work->error_ = withContext(error, *work);
  }
  board_->fail(rank_, error, valid_posts);
  released_.swap(running_);
  for (Peer& peer : peers_) peer.expected.clear();
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
    if (const std::optional<Error> loss = lossOf(work, now)) throw *loss;
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
