// Errors and notices of failed operations: mismatches, and operations that a peer gave up.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/call.hpp"
#include "base/error.hpp"

namespace hdpcomm {

// The operations that a failure ends: sends up to a number, receives up to a number, or both. The
// difference of two numbers is signed, so that it is right when they wrap.
struct GiveUp {
  std::optional<uint32_t> sends;
  std::optional<uint32_t> recvs;
};

// How the error of a refused operation ends.
inline constexpr const char* kOutOfStepAdvice =
    "call resync() on all ranks of the communicator (or of a subset() without those that died)";

// How errors that follow from another one name it.
inline constexpr const char* kSince = " since: ";
inline constexpr const char* kResyncAfter = " called resync() after: ";
// How the error of an operation ends that another rank gave up; the number of that rank follows.
inline constexpr const char* kToldBy = " (told by rank ";

// The first error that the text of a refusal, or of a resync(), names; the text itself if it is no
// such one.
inline std::string firstCause(const std::string& text) {
  size_t begin = 0;
  for (const std::string_view before : {kSince, kResyncAfter}) {
    const size_t at = text.rfind(before);
    if (at != std::string::npos) begin = std::max(begin, at + before.size());
  }
  const size_t end = text.find(std::string("; ") + kOutOfStepAdvice, begin);
  return text.substr(begin, end == std::string::npos ? end : end - begin);
}

// A rank called resync(); `after`: the first error that it knows of, empty if there was none.
inline Error calledResync(int caller, const std::string& after, const ErrorContext& context) {
  const std::string who = "rank " + std::to_string(caller);
  return Error(ErrorKind::kAborted,
               after.empty() ? who + " called resync()" : who + kResyncAfter + after, context);
}

// Whether an error says no more than that a rank called resync().
inline bool hidesCause(const Error& error) {
  return error.kind() == ErrorKind::kAborted &&
         firstCause(error.what()).ends_with(" called resync()");
}

// Whether an error says no more than that the rank that raises it called resync().
inline bool calledResyncItself(const Error& error) {
  return hidesCause(error) && firstCause(error.what()) == "rank " +
                                                              std::to_string(error.context().rank) +
                                                              " called resync()";
}

inline bool upTo(uint32_t number, std::optional<uint32_t> limit) {
  return limit && static_cast<int32_t>(*limit - number) >= 0;
}

// What one rank of a pair called, and the bytes that it sent or expected.
struct Called {
  int rank;
  const Call& call;
  size_t bytes;
};

// The Mismatch that the rank of `own` raises; `sent`: whether it was the sender of the message.
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

// The error of a sender whose peer went on without its message.
inline Error droppedError(int rank, int peer, const Call& call) {
  return Error(ErrorKind::kAborted,
               "rank " + std::to_string(peer) + " went on without the message of " +
                   describe(call) + " from rank " + std::to_string(rank) +
                   ": it called something else there, or is out of step since an error; " +
                   kOutOfStepAdvice,
               {.rank = rank, .peer = peer, .op = opName(call.op), .ranks = {}, .seq = -1});
}

// A notice on the wire has two numbers; these flags say which of them are valid.
inline constexpr uint32_t kEndsSends = 2;
inline constexpr uint32_t kEndsRecvs = 4;

// The notice that this rank sends to a peer when it gives up an operation.
struct OwnNotice {
  GiveUp ends;
  std::optional<uint32_t> first_send;  // the messages from this one on are withdrawn
  ErrorKind kind = ErrorKind::kInternal;
  int16_t cause = -1;  // the rank that the error concerns
  std::string text;

  uint32_t flags() const { return (ends.sends ? kEndsSends : 0) | (ends.recvs ? kEndsRecvs : 0); }
};

// What a peer's notice ends on this rank: the peer's sends are this rank's receives, and the
// reverse.
inline GiveUp endsHere(uint32_t flags, uint32_t sends, uint32_t recvs) {
  GiveUp ours;
  if ((flags & kEndsSends) != 0) ours.recvs = sends;
  if ((flags & kEndsRecvs) != 0) ours.sends = recvs;
  return ours;
}

// A failure notice in the view of its receiver.
struct Notice {
  GiveUp ours;
  Error error;

  bool concerns(std::optional<uint32_t> send, std::optional<uint32_t> recv) const {
    return (send && ours.sends == send) || (recv && ours.recvs == recv);
  }
};

// Whether a peer's notice can name this kind of error and this rank as its cause.
inline bool noticeFits(uint8_t kind, int cause, int num_ranks) {
  return kind <= static_cast<uint8_t>(ErrorKind::kDevice) && cause >= -1 && cause < num_ranks;
}

// The notice that `peer` sent to `rank`. `ours`: what it ends here, `cause`: the rank that the
// error concerns.
inline Notice noticeFrom(int peer, int rank, ErrorKind kind, const std::string& text, int cause,
                         const GiveUp& ours) {
  const bool told = text.find(kToldBy) != std::string::npos;
  // An error that concerns this rank concerns the peer when this rank raises it.
  const int concerned = cause == rank || cause < 0 ? peer : cause;
  return {ours, Error(kind, told ? text : text + kToldBy + std::to_string(peer) + ")",
                      {.rank = rank, .peer = concerned, .op = {}, .ranks = {}, .seq = -1})};
}

}  // namespace hdpcomm
