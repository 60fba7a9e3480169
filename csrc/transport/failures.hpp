// What is said when operations fail: of a mismatch, and of what a peer gave up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/call.hpp"
#include "base/error.hpp"

namespace hdpcomm {

// What a failure ends: sends up to a number, receives up to a number, or both. Differences of
// numbers are signed, so that they are right across the wrap.
struct GiveUp {
  std::optional<uint32_t> sends;
  std::optional<uint32_t> recvs;
};

inline bool upTo(uint32_t number, std::optional<uint32_t> limit) {
  return limit && static_cast<int32_t>(*limit - number) >= 0;
}

// What one rank called on a pair, and the bytes that it sent or expected.
struct Called {
  int rank;
  const Call& call;
  size_t bytes;
};

// Seen by the rank of `own`, which sent (or received).
inline Error mismatchError(const Called& own, const Called& other, bool sent) {
  const auto clause = [](const Called& called, const char* verb) {
    return "rank " + std::to_string(called.rank) + " called " + describe(called.call) + " and " +
           verb + " " + std::to_string(called.bytes) + " bytes";
  };
  return Error(
      ErrorKind::kMismatch,
      clause(own, sent ? "sent" : "expected") + ", but " +
          clause(other, sent ? "expected" : "sent") +
          ": call the same operations with the same arguments in the same order",
      {.rank = own.rank, .peer = other.rank, .op = opName(own.call.op), .ranks = {}, .seq = -1});
}

// How a notice travels: what it ends is in two numbers, of which these say which hold.
inline constexpr uint32_t kEndsSends = 2;
inline constexpr uint32_t kEndsRecvs = 4;

// What this rank tells a peer of an operation that it gave up.
struct OwnNotice {
  GiveUp ends;
  ErrorKind kind = ErrorKind::kInternal;
  int16_t cause = -1;  // the rank that the error concerns
  std::string text;

  uint32_t flags() const { return (ends.sends ? kEndsSends : 0) | (ends.recvs ? kEndsRecvs : 0); }
};

// A peer's notice ended its sends up to one number and its receives up to another: what that ends
// here, where its sends are received.
inline GiveUp endsHere(uint32_t flags, uint32_t sends, uint32_t recvs) {
  GiveUp ours;
  if ((flags & kEndsSends) != 0) ours.recvs = sends;
  if ((flags & kEndsRecvs) != 0) ours.sends = recvs;
  return ours;
}

// A failure notice, as its receiver understands it.
struct Notice {
  GiveUp ours;
  Error error;

  bool concerns(std::optional<uint32_t> send, std::optional<uint32_t> recv) const {
    return (send && ours.sends == send) || (recv && ours.recvs == recv);
  }
};

// What `peer` told this rank: `ours` in this rank's view, `cause` the rank that the error concerns.
inline Notice noticeFrom(int peer, int rank, ErrorKind kind, const std::string& text, int cause,
                         const GiveUp& ours) {
  const bool told = text.find("(told by") != std::string::npos;
  // An error about this rank is, seen from here, one about the peer.
  const int concerned = cause == rank || cause < 0 ? peer : cause;
  return {ours, Error(kind, told ? text : text + " (told by rank " + std::to_string(peer) + ")",
                      {.rank = rank, .peer = concerned, .op = {}, .ranks = {}, .seq = -1})};
}

}  // namespace hdpcomm
