#include "comm/stream/peer_calls.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "transport/failures.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {
namespace {

using device::BoardState;
using device::CallEntry;
using std::chrono::milliseconds;

// Time for messages that a lost peer has already sent.
constexpr auto kLossGrace = milliseconds(300);
// A rank may close because another one failed: time for the notice of that failure.
constexpr auto kNoticeGrace = milliseconds(120);
// Time for the others' part of an operation in which a member that left has done its own.
constexpr auto kLeaveGrace = milliseconds(2000);

std::string detailsOf(const CallEntry& entry) {
  std::string text;
  if (entry.landing != StreamMover::kNoLanding) {
    text += " (landing at " + std::to_string(entry.landing) + ")";
  }
  if (entry.captured != 0) text += " (captured into a graph)";
  return text;
}

}  // namespace

void PeerCalls::plan(StreamWork& work, int peer, int posts, int expects) {
  const Peer& other = of(peer);
  Share& share = work.shareOf(peer);
  share.posted = other.num_posted;
  share.posts += static_cast<uint64_t>(posts);
  share.expects += static_cast<uint64_t>(expects);
  if (share.expects > 0) share.expected = other.num_expected + share.expects;
}

void PeerCalls::post(int peer, const CallEntry& entry) {
  Peer& other = of(peer);
  ++other.num_posted;
  if (!other.unposted.empty() || !board_->post(rank_, peer, entry)) other.unposted.push_back(entry);
}

void PeerCalls::expect(const WorkPtr& work, int peer, const CallEntry& entry) {
  Peer& other = of(peer);
  ++other.num_expected;
  board_->expect(peer, rank_, entry);
  ++work->uncompared_;
  other.expected.push_back({work, entry});
}

// A captured operation is not among the running ones, which hear of a failed peer by lossError().
// The entry of a peer that failed first never comes.
std::optional<PeerCalls::Failure> PeerCalls::captured(int rank) const {
  const WorkPtr work = of(rank).expected.front().work;
  if (!work->captured_ || board_->state(rank) != BoardState::kFailed) return std::nullopt;
  for (const Share& share : work->shares_) {
    if (share.peer != rank) continue;
    if (const auto error = departureError(*work, share)) return Failure{work, *error};
    break;
  }
  return std::nullopt;
}

// The n-th entry of a pair on one side is the n-th on the other.
std::optional<PeerCalls::Failure> PeerCalls::compare() {
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = of(rank);
    while (!peer.unposted.empty() && board_->post(rank_, rank, peer.unposted.front())) {
      peer.unposted.pop_front();
    }
    while (!peer.expected.empty()) {
      const std::optional<CallEntry> theirs = board_->take(rank, rank_);
      if (!theirs) {
        if (auto failure = captured(rank)) return failure;
        break;
      }
      const Expected ours = std::move(peer.expected.front());
      peer.expected.pop_front();
      if (*theirs == ours.entry) {
        board_->accept(rank, rank_);
        --ours.work->uncompared_;
        continue;
      }
      return Failure{
          ours.work,
          Error(ErrorKind::kMismatch,
                "rank " + std::to_string(rank_) + " called " + describe(ours.entry.call) +
                    detailsOf(ours.entry) + " and expected " + std::to_string(ours.entry.bytes) +
                    " bytes, but rank " + std::to_string(rank) + " called " +
                    describe(theirs->call) + detailsOf(*theirs) + " and sent " +
                    std::to_string(theirs->bytes) +
                    " bytes: call the same operations with the same arguments in the same order",
                {.rank = rank_, .peer = rank, .op = {}, .ranks = {}, .seq = -1})};
    }
  }
  return std::nullopt;
}

void PeerCalls::forgetExpected() {
  for (Peer& peer : peers_) peer.expected.clear();
}

std::vector<uint64_t> PeerCalls::validPosts(const std::vector<WorkPtr>& running) const {
  std::vector<uint64_t> valid;
  for (const Peer& peer : peers_) valid.push_back(peer.num_posted);
  for (const WorkPtr& work : running) {
    for (const Share& share : work->shares_) {
      uint64_t& limit = valid[static_cast<size_t>(share.peer)];
      if (share.posts > 0) limit = std::min(limit, share.posted);
    }
  }
  return valid;
}

bool PeerCalls::awaits(const StreamWork& work, int peer) const {
  const auto& expected = of(peer).expected;
  return std::any_of(expected.begin(), expected.end(),
                     [&](const Expected& each) { return each.work.get() == &work; });
}

bool PeerCalls::gone(int peer, bool look, Clock::time_point now) {
  return peer != rank_ &&
         (board_->state(peer) != BoardState::kReady || (look && !lives(peer, now)));
}

std::vector<int> PeerCalls::awaitedBy(const StreamWork& work) const {
  if (!work.started_) return {rank_};
  std::vector<int> members;
  std::vector<int> missing;
  for (const Share& share : work.shares_) {
    if (share.peer == rank_) continue;
    members.push_back(share.peer);
    const bool called = share.expects > 0 ? !awaits(work, share.peer) : heard(share);
    if (!called) missing.push_back(share.peer);
  }
  return missing.empty() ? members : missing;
}

std::optional<Error> PeerCalls::absenceError(const StreamWork& work) const {
  for (const Share& share : work.shares_) {
    const bool only_sent_to = share.expects == 0;
    if (share.peer == rank_ || (hasPosted(share) && !only_sent_to)) continue;
    if (board_->state(share.peer) != BoardState::kReady) {
      return departureError(work, mostInformative(work, share));
    }
  }
  return std::nullopt;
}

std::optional<Error> PeerCalls::lossError(StreamWork& work, Clock::time_point now) {
  for (const Share& share : work.shares_) {
    if (!gone(share.peer, true, now)) continue;
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

Error PeerCalls::goneError(const StreamWork& work, const Share& share) const {
  if (board_->state(share.peer) != BoardState::kReady) {
    return *departureError(work, mostInformative(work, share));
  }
  return work.withContext(
      Error(ErrorKind::kPeerLost,
            "rank " + std::to_string(share.peer) + " died while rank " + std::to_string(rank_) +
                " waited for it in " + describe(work.call_),
            {.rank = rank_, .peer = share.peer, .op = {}, .ranks = {}, .seq = -1}));
}

bool PeerCalls::lives(int rank, Clock::time_point now) {
  Peer& peer = of(rank);
  if (peer.lives && now - peer.lives_checked >= kLookInterval) {
    peer.lives_checked = now;
    peer.lives = board_->processAlive(rank);
  }
  return peer.lives;
}

// The error of an operation for which a member that has failed or left did not do its part; none if
// the member is there.
std::optional<Error> PeerCalls::departureError(const StreamWork& work, const Share& share) const {
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
  return work.withContext(Error(last.kind(), text, context));
}

// The member that is gone and whose last error says most: a failure before a close, a failure that
// the rank found by itself before one that it was told of, a close with a reason before one
// without. Among equals `found`.
const PeerCalls::Share& PeerCalls::mostInformative(const StreamWork& work,
                                                   const Share& found) const {
  const auto rating = [this](const Share& share) {
    const BoardState state = share.peer == rank_ ? BoardState::kReady : board_->state(share.peer);
    if (state != BoardState::kFailed && state != BoardState::kClosed) return 4;
    const std::string text = board_->lastError(share.peer).what();
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    if (state == BoardState::kFailed) return says(kToldBy) ? 1 : 0;
    return says("last words") ? 2 : 3;
  };
  const Share* best = &found;
  for (const Share& share : work.shares_) {
    if (rating(share) < rating(*best)) best = &share;
  }
  return *best;
}

}  // namespace hdpcomm
