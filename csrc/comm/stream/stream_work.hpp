// One operation of a stream engine: enqueued whole when it is made, ended when its events are.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "comm/host/work.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

class StreamWork {
 public:
  // `rank`: the one that calls it; `seq`: its number on that rank.
  StreamWork(Call call, Ranks ranks, int rank, int64_t seq)
      : call_(call), ranks_(std::move(ranks)), rank_(rank), seq_(seq) {}
  StreamWork(const StreamWork&) = delete;
  StreamWork& operator=(const StreamWork&) = delete;

  const Call& call() const { return call_; }
  const Ranks& ranks() const { return ranks_; }
  // The error as one of this operation.
  Error withContext(const Error& error) const;

 private:
  friend class StreamEngine;
  friend class PeerCalls;

  enum class State : uint8_t { kRunning, kDone, kFailed };

  // The operation's entries on the call board for one peer.
  struct Share {
    int peer = -1;          // global rank
    uint64_t posted = 0;    // entries posted to the peer before this operation
    uint64_t posts = 0;     // entries that this operation posts to it
    uint64_t expects = 0;   // entries that it expects from it
    uint64_t expected = 0;  // all entries expected from it up to and with these; 0: none of these
  };
  Share& shareOf(int peer);

  Call call_;
  Ranks ranks_;
  const int rank_;
  const int64_t seq_;
  FlightRecorder::Entry flight_;
  std::vector<Share> shares_;
  Fence begin_;                         // where the caller's stream was
  std::vector<StreamMover::End> ends_;  // all of them done: the operation is
  bool captured_ = false;               // into a graph: the engine does not watch it
  bool by_liveness_ = false;            // its deadline moves with the ranks that it waits for
  bool submitted_ = false;              // all of it is enqueued
  bool ends_missing_ = false;  // not all of `ends_` could be recorded: it ends with the device

  // It has failed, and its streams did not drain in time; read by the thread that waits.
  std::atomic<bool> stuck_{false};

  // Under the engine's lock.
  State state_ = State::kRunning;
  std::optional<Error> error_;
  int uncompared_ = 0;                          // entries that the peers have yet to show
  std::optional<Clock::time_point> started_;    // when `begin_` was first seen done
  Clock::time_point allowed_;                   // by liveness: until then at least
  std::optional<Clock::time_point> loss_seen_;  // when a member was first seen to be gone
};

}  // namespace hdpcomm
