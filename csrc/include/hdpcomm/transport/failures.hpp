// What the transports share of the failure protocol (transport.hpp): which operations of a pair
// have failed, and how it is said.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hdpcomm/base/call.hpp"
#include "hdpcomm/base/error.hpp"

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

// The failures that one peer told of; ours are the sends that it does not take, and the receives
// that it does not serve.
class GivenUp {
 public:
  void add(const Notice& notice) {
    const GiveUp& ours = notice.ours;
    if (ours.sends && (!up_to_.sends || upTo(*up_to_.sends, ours.sends))) up_to_.sends = ours.sends;
    if (ours.recvs && (!up_to_.recvs || upTo(*up_to_.recvs, ours.recvs))) up_to_.recvs = ours.recvs;
    last_ = notice.error;
    if (notices_.size() == kNotices) notices_.erase(notices_.begin());
    notices_.push_back(notice);
  }

  // Why a request with this number fails as soon as it is posted, or null.
  const Error* send(uint32_t number) const {
    return upTo(number, up_to_.sends) ? &*last_ : nullptr;
  }
  const Error* recv(uint32_t number) const {
    return upTo(number, up_to_.recvs) ? &*last_ : nullptr;
  }

  // The failure of the very operation that has these numbers, or null.
  const Error* operation(std::optional<uint32_t> send, std::optional<uint32_t> recv) const {
    for (const Notice& notice : notices_) {
      if (notice.concerns(send, recv)) return &notice.error;
    }
    return nullptr;
  }

 private:
  static constexpr size_t kNotices = 64;  // older ones are forgotten

  GiveUp up_to_;
  std::optional<Error> last_;
  std::vector<Notice> notices_;
};

}  // namespace hdpcomm
