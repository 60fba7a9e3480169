// What the streams cannot know: whether both sides called the same, whether the peers live, the
// deadline; and what happens when one of these fails.
#include <algorithm>

#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {
namespace {

using device::BoardState;
using device::CallEntry;
using std::chrono::milliseconds;

constexpr auto kWatch = milliseconds(50);
// For what a lost peer has already set in motion.
constexpr auto kGrace = milliseconds(300);
// A rank may close because another one failed, of which this one is to hear.
constexpr auto kHearsay = milliseconds(120);
// For what others have yet to do in an operation in which a member that left has done its part.
constexpr auto kLeftGrace = milliseconds(2000);

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

// The n-th entry of a pair on one side is the n-th on the other.
void StreamEngine::compareCalls() {
  for (int rank = 0; rank < num_ranks_ && !failed_; ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    while (!peer.unposted.empty() && board_->post(rank_, rank, peer.unposted.front())) {
      peer.unposted.pop_front();
    }
    while (!peer.expected.empty()) {
      const std::optional<CallEntry> theirs = board_->take(rank, rank_);
      if (!theirs) break;
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

Error StreamEngine::placed(const Error& error, const StreamWork& work) const {
  ErrorContext context = error.context();
  context.rank = rank_;
  context.op = opName(work.call_.op);
  context.ranks = *work.ranks_;
  context.seq = work.seq_;
  return Error(error.kind(), error.what(), context);
}

// What is not of our own making: no memory, no thread.
Error StreamEngine::errorOf(const std::exception& failure) const {
  if (const auto* error = dynamic_cast<const Error*>(&failure)) return *error;
  return Error(ErrorKind::kInternal,
               "rank " + std::to_string(rank_) +
                   " could not go on with its device operations: " + failure.what());
}

Error StreamEngine::timeoutOf(const StreamWork& work, double seconds) const {
  return placed(Error(ErrorKind::kTimeout,
                      "rank " + std::to_string(rank_) + " waited " + std::to_string(seconds) +
                          " s in " + describe(work.call_) + " (ranks " + listOf(*work.ranks_) +
                          "): look for a rank that did not call it, or raise timeout="),
                work);
}

// A device that has failed says so on every call; what it held never ends.
bool StreamEngine::ended(const StreamWork& work) const {
  if (!work.submitted_ || device_lost_) return false;
  try {
    return std::all_of(work.ends_.begin(), work.ends_.end(),
                       [&](const OwnedEvent& e) { return device_->query(e.get()); });
  } catch (const Error&) {
    device_lost_ = true;
    return false;
  }
}

void StreamEngine::settleEnded() {
  std::erase_if(running_, [&](const WorkPtr& work) {
    // At the end nobody compares any more: the messages came, and that has to do.
    const bool compared = work->uncompared_ == 0 || closed_;
    if (work->state_ != StreamWork::State::kRunning || !compared || !ended(*work)) return false;
    work->state_ = StreamWork::State::kDone;
    return true;
  });
}

// What a member that has failed or left says to an operation for which it did not do its part.
std::optional<Error> StreamEngine::refusalOf(const StreamWork& work,
                                             const StreamWork::Share& share) const {
  const BoardState state = board_->state(share.peer);
  if (share.peer == rank_ || state == BoardState::kReady) return std::nullopt;
  const Error words = board_->lastWords(share.peer);
  std::string text = words.what();
  ErrorContext context = words.context();
  context.peer = share.peer;
  if (state == BoardState::kClosed) {
    text += " while rank " + std::to_string(rank_) + " waited for it in " + describe(work.call_);
  } else if (context.rank != rank_ && text.find("(told by") == std::string::npos) {
    text += " (told by rank " + std::to_string(share.peer) + ")";
  }
  return placed(Error(words.kind(), text, context), work);
}

// Of the members that are gone, the one whose end says most: a failure before a farewell, what a
// rank found out itself before what it was told, last words before none. Among equals the given
// one.
const StreamWork::Share& StreamEngine::mostTelling(const StreamWork& work,
                                                   const StreamWork::Share& found) const {
  const auto silence = [this](const StreamWork::Share& share) {
    const BoardState state = share.peer == rank_ ? BoardState::kReady : board_->state(share.peer);
    if (state != BoardState::kFailed && state != BoardState::kClosed) return 4;
    const std::string words = board_->lastWords(share.peer).what();
    const auto says = [&](const char* part) { return words.find(part) != std::string::npos; };
    if (state == BoardState::kFailed) return says("(told by") ? 1 : 0;
    return says("last words") ? 2 : 3;
  };
  const StreamWork::Share* best = &found;
  for (const StreamWork::Share& share : work.shares_) {
    if (silence(share) < silence(*best)) best = &share;
  }
  return *best;
}

bool StreamEngine::sound(const StreamWork::Share& share) const {
  return board_->state(share.peer) == BoardState::kReady ||
         share.expected <= board_->sound(share.peer, rank_);
}

// Asks the board at most once a pass of the watcher, whoever wants to know and however often: for a
// process of this host that is a look into /proc.
bool StreamEngine::lives(int rank, Clock::time_point now) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.lives && now - peer.asked >= kWatch) {
    peer.asked = now;
    peer.lives = board_->processAlive(rank);
  }
  return peer.lives;
}

// Of a member that left, failed or died before it had done its part.
std::optional<Error> StreamEngine::lossOf(StreamWork& work, Clock::time_point now) {
  for (const StreamWork::Share& share : work.shares_) {
    if (share.peer == rank_) continue;
    const bool announced = board_->state(share.peer) != BoardState::kReady;
    if (!announced && lives(share.peer, now)) continue;
    if (!work.bereft_) work.bereft_ = now;
    // Its part may still be under way.
    const bool left = board_->state(share.peer) == BoardState::kClosed;
    const auto grace =
        sound(share) ? (left ? kLeftGrace : kGrace) : (left ? kHearsay : milliseconds(0));
    if (now - *work.bereft_ < grace) continue;
    if (announced) return refusalOf(work, mostTelling(work, share));
    return placed(Error(ErrorKind::kPeerLost,
                        "rank " + std::to_string(share.peer) + " died while rank " +
                            std::to_string(rank_) + " waited for it in " + describe(work.call_),
                        {.rank = rank_, .peer = share.peer, .op = {}, .ranks = {}, .seq = -1}),
                  work);
  }
  return std::nullopt;
}

std::optional<Error> StreamEngine::lookAfter(StreamWork& work, Clock::time_point now) {
  if (std::optional<Error> loss = lossOf(work, now)) return loss;
  if (!work.started_) {
    if (device_->query(work.begin_.get())) work.started_ = now;
  } else if (const double seconds = secondsBetween(*work.started_, now); seconds > timeout_s_) {
    return timeoutOf(work, seconds);
  }
  return std::nullopt;
}

// This operation has failed, whatever its streams did.
void StreamEngine::failWork(StreamWork& work, const Error& error) {
  if (failed_) return;
  work.error_ = placed(error, work);
  work.state_ = StreamWork::State::kFailed;
  fail(*work.error_);
}

// All that has not ended ends with the error; the watcher then gives its streams what they wait
// for. The others hear of it first, so that they do not take what these streams then write for
// messages.
void StreamEngine::fail(const Error& error) {
  if (failed_) return;
  settleEnded();
  failed_ = error;
  release_due_ = true;
  std::vector<uint64_t> sound;
  for (const Peer& peer : peers_) sound.push_back(peer.num_posted);
  for (const WorkPtr& work : running_) {
    for (const StreamWork::Share& share : work->shares_) {
      uint64_t& limit = sound[static_cast<size_t>(share.peer)];
      if (share.posts > 0) limit = std::min(limit, share.posted);
    }
    work->state_ = StreamWork::State::kFailed;
    if (!work->error_) work->error_ = placed(error, *work);
  }
  board_->fail(rank_, error, sound);
  released_.swap(running_);
  for (Peer& peer : peers_) peer.expected.clear();
  wake_.notify_all();
}

// Returns whether all released operations have ended. The mover is told at least once: something of
// it may be under way that belongs to no operation which runs.
bool StreamEngine::releaseOnce() {
  std::erase_if(released_, [&](const WorkPtr& work) { return !work->submitted_ || ended(*work); });
  if (device_lost_) released_.clear();
  if (released_.empty() && !release_due_) return true;
  release_due_ = false;
  mover_->release(control_stream_.get());
  device_->synchronize(control_stream_.get(), kDrain);
  return false;
}

// For a mover that waits on the host in the middle of an operation.
StreamMover::WaitCheck StreamEngine::waitCheckOf(StreamWork& work) {
  return [this, &work, start = Clock::now()] {
    compareCalls();
    if (failed_) throw work.error_ ? *work.error_ : *failed_;
    const auto now = Clock::now();
    if (const std::optional<Error> loss = lossOf(work, now)) throw *loss;
    if (const double seconds = secondsBetween(start, now); seconds > timeout_s_) {
      throw timeoutOf(work, seconds);
    }
  };
}

void StreamEngine::lookAround() {
  if (failed_) {
    releaseOnce();
    return;
  }
  compareCalls();
  try {
    mover_->checkHealth();
  } catch (const Error& error) {  // of the mover: the device itself goes on
    fail(error);
    return;
  }
  const auto now = Clock::now();
  for (const WorkPtr& work : std::vector<WorkPtr>(running_)) {
    if (failed_ || !work->submitted_) return;
    if (ended(*work)) continue;
    if (const std::optional<Error> error = lookAfter(*work, now)) failWork(*work, *error);
  }
}

void StreamEngine::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    wake_.wait_for(lock, releasing() ? kReleaseAgain : kWatch);
    if (stop_) return;
    try {
      lookAround();
    } catch (const std::exception& failure) {
      const Error error = errorOf(failure);
      device_lost_ = device_lost_ || error.kind() == ErrorKind::kDevice;
      fail(error);
    }
  }
}

}  // namespace hdpcomm
