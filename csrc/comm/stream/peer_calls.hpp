// What this rank and each of its peers have called, as both post it on the call board: whether they
// called the same, what is still to come, and the error of an operation whose peers are gone.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/stream/stream_work.hpp"
#include "transport/stream/call_board.hpp"

namespace hdpcomm {

// Used under the engine's lock.
class PeerCalls {
 public:
  using WorkPtr = std::shared_ptr<StreamWork>;
  using Share = StreamWork::Share;
  struct Failure {
    WorkPtr work;
    Error error;
  };
  // How often a process is looked for, since the board reads /proc for one of this host.
  static constexpr auto kLookInterval = std::chrono::milliseconds(50);

  PeerCalls(std::shared_ptr<device::CallBoard> board, int rank, int num_ranks)
      : board_(std::move(board)), rank_(rank), peers_(static_cast<size_t>(num_ranks)) {}

  // The operation posts and expects so many entries more; before any of them.
  void plan(StreamWork& work, int peer, int posts, int expects);
  // Numbers of the next entries of a peer.
  uint64_t posted(int peer) const { return of(peer).num_posted; }
  uint64_t expected(int peer) const { return of(peer).num_expected; }
  // Entries wait here for room on the board; compare() posts them.
  void post(int peer, const device::CallEntry& entry);
  void expect(const WorkPtr& work, int peer, const device::CallEntry& entry);

  // Compares what has come; the first operation that cannot go on, since a peer called another one
  // or, where it is captured, has failed.
  std::optional<Failure> compare();
  // Nothing is compared any more.
  void forgetExpected();

  // By rank, how many entries belong to operations that ended well, where all of `running` fail.
  std::vector<uint64_t> validPosts(const std::vector<WorkPtr>& running) const;
  // Whether the peer has taken all that the operation posted to it.
  bool heard(const Share& share) const {
    return share.posts == 0 || board_->accepted(rank_, share.peer) >= share.posted + share.posts;
  }
  // Whether entries of the peer are still to come for the operation.
  bool awaits(const StreamWork& work, int peer) const;
  // Whether a peer that is gone had posted its part of the operation.
  bool hasPosted(const Share& share) const {
    return board_->state(share.peer) == device::BoardState::kReady ||
           share.expected <= board_->validPosts(share.peer, rank_);
  }
  // Whether the peer has left or failed; `look`: or its process has ended, as last seen.
  bool gone(int peer, bool look, Clock::time_point now);
  // The ranks without which the operation cannot go on: this one, while its stream has not come to
  // it; those that have not called it; if all have, all of them, since their streams may be behind.
  std::vector<int> awaitedBy(const StreamWork& work) const;

  // Before any peer hears of the operation: the error, if a member has failed or left without its
  // part of it.
  std::optional<Error> absenceError(const StreamWork& work) const;
  // The error of an operation that can no longer end, since a member left, failed or died before
  // it had done its part.
  std::optional<Error> lossError(StreamWork& work, Clock::time_point now);
  // The error of an operation that needs more from a member that has failed, left or died.
  Error goneError(const StreamWork& work, const Share& share) const;

 private:
  struct Expected {
    WorkPtr work;
    device::CallEntry entry;
  };
  struct Peer {
    std::deque<device::CallEntry> unposted;  // the ring on the board was full
    std::deque<Expected> expected;           // not yet compared
    uint64_t num_posted = 0;                 // with the unposted
    uint64_t num_expected = 0;
    bool lives = true;                // as the board last said
    Clock::time_point lives_checked;  // when it did; the epoch at the start
  };

  Peer& of(int peer) { return peers_[static_cast<size_t>(peer)]; }
  const Peer& of(int peer) const { return peers_[static_cast<size_t>(peer)]; }
  bool lives(int rank, Clock::time_point now);
  std::optional<Failure> captured(int rank) const;
  std::optional<Error> departureError(const StreamWork& work, const Share& share) const;
  const Share& mostInformative(const StreamWork& work, const Share& found) const;

  const std::shared_ptr<device::CallBoard> board_;
  const int rank_;
  std::vector<Peer> peers_;
};

}  // namespace hdpcomm
