#include "transport/host/pair_failures.hpp"

namespace hdpcomm {

bool PairFailures::refuse(Completion* completion, bool given_up) const {
  if (!completion->failure) completion->failure = given_up ? last_ : refusal_;
  return true;
}

void PairFailures::markOutOfStep(const Error& error) {
  // Numbers wrap, and a limit covers the 2^31 numbers before it: the next 2^30 operations, and the
  // 2^30 before them, some of which have taken their numbers and are not posted yet.
  constexpr uint32_t kAhead = 1U << 30;
  refused_ = {send_number_ + kAhead, recv_number_ + kAhead};
  if (refusal_) return;
  const bool gone = error.kind() == ErrorKind::kPeerLost && error.context().peer == peer_;
  const std::string other = peer_ == rank_ ? "itself" : "rank " + std::to_string(peer_);
  refusal_ = Error(gone ? ErrorKind::kPeerLost : ErrorKind::kAborted,
                   "rank " + std::to_string(rank_) + " is out of step with " + other + kSince +
                       error.what() + "; " + kOutOfStepAdvice,
                   {.rank = rank_, .peer = peer_, .op = {}, .ranks = {}, .seq = -1});
}

// One notice is enough, unless a later failure ends earlier sends: then the peer must drop these
// too.
std::optional<OwnNotice> PairFailures::noticeOf(const Error& error, const GiveUp& ends,
                                                std::optional<uint32_t> first_send) {
  const bool earlier =
      first_send &&
      (!notified_first_send_ || static_cast<int32_t>(*first_send - *notified_first_send_) < 0);
  if (std::exchange(notified_, true) && !earlier) return std::nullopt;
  if (earlier) notified_first_send_ = first_send;
  return OwnNotice{ends, first_send, error.kind(), static_cast<int16_t>(error.context().peer),
                   error.what()};
}

void PairFailures::restart() {
  send_number_ = recv_number_ = 0;
  markOutOfStep(resyncOf(rank_));
  restarted_ = true;
  // The old numbers say nothing about the new ones.
  given_up_ = {};
  last_ = std::nullopt;
  notices_.clear();
  // If this attempt fails, the peer has to be notified again: it may be in step by then.
  notified_ = false;
  notified_first_send_ = std::nullopt;
}

void PairFailures::resynced() {
  refused_ = {};
  refusal_ = std::nullopt;
  restarted_ = false;
  notified_ = false;
  notified_first_send_ = std::nullopt;
}

void PairFailures::record(const Notice& notice) {
  if (restarted_) return;  // of before
  if (!refusal_) {
    given_up_ = notice.ours;
    last_ = notice.error;
  }
  markOutOfStep(notice.error);
  if (notices_.size() == kNotices) notices_.erase(notices_.begin());
  notices_.push_back(notice);
}

const Error* PairFailures::operation(std::optional<uint32_t> send,
                                     std::optional<uint32_t> recv) const {
  for (const Notice& notice : notices_) {
    if (notice.concerns(send, recv)) return &notice.error;
  }
  return nullptr;
}

}  // namespace hdpcomm
