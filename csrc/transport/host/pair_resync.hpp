// How the two ranks of a pair come into step again: one rank's side.
//
// Each rank sends a marker with the number of its own attempt and of the peer's last attempt that
// it knows. Markers travel in the channel of the messages, and everything that comes before one is
// dropped. A rank is in step when a marker names its own current attempt; it answers each new
// attempt of the peer once. So both ranks know which marker is the last one in either direction,
// also after attempts that ran into a deadline on one side only.
#pragma once

#include <cstdint>
#include <optional>

#include "transport/transport.hpp"

namespace hdpcomm {

struct Marker {
  uint32_t attempt = 0;       // the sender's own
  uint32_t peer_attempt = 0;  // the receiver's last attempt that the sender knows
};

class PairResync {
 public:
  bool underWay() const { return completion_ != nullptr; }
  bool belongsTo(const Completion* completion) const { return completion_ == completion; }

  // Starts an attempt, which is a request of the operation. Returns its first marker.
  Marker begin(Completion* completion) {
    completion_ = completion;
    ++completion->pending;
    ++attempt_;
    answered_ = peer_attempt_;
    return {attempt_, peer_attempt_};
  }
  // Returns true if the pair is in step from this marker on. Sets `answer` to the marker to send
  // back, if one is due.
  bool receive(const Marker& marker, std::optional<Marker>* answer) {
    peer_attempt_ = marker.attempt;
    if (!underWay()) return false;
    if (answered_ != peer_attempt_) {
      answered_ = peer_attempt_;
      *answer = Marker{attempt_, peer_attempt_};
    }
    if (marker.peer_attempt != attempt_) return false;
    --completion_->pending;
    completion_ = nullptr;
    return true;
  }
  void cancel(const Completion* completion) {
    if (completion_ == completion) completion_ = nullptr;
  }
  void fail(const Error& error) {
    if (underWay() && !completion_->failure) completion_->failure = error;
  }

 private:
  Completion* completion_ = nullptr;  // of the attempt that is under way
  uint32_t attempt_ = 0;
  uint32_t peer_attempt_ = 0;  // the last one received
  uint32_t answered_ = 0;      // the last attempt of the peer that this rank's markers have named
};

}  // namespace hdpcomm
