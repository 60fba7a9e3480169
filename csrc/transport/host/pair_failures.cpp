#include "transport/host/pair_failures.hpp"

namespace hdpcomm {

OwnNotice PairFailures::giveUp(const Error& error, const GiveUp& ends) {
  if (ends.sends) own_.sends = ends.sends;
  if (ends.recvs) own_.recvs = ends.recvs;
  return {ends, error.kind(), static_cast<int16_t>(error.context().peer), error.what()};
}

bool PairFailures::refuse(Completion* completion) const {
  if (!completion->failure) completion->failure = last_;
  return true;
}

// `failed_requests`: this rank had posted requests of the operations that the peer gave up.
void PairFailures::record(const Notice& notice, bool failed_requests) {
  const GiveUp& ours = notice.ours;
  const auto equal = [](std::optional<uint32_t> a, std::optional<uint32_t> b) {
    return a && b && *a == *b;
  };
  if (failed_requests || equal(ours.sends, own_.sends) || equal(ours.recvs, own_.recvs)) {
    // Both ranks failed here, perhaps in different calls: their numbers are made equal again.
    if (upTo(send_number_, ours.sends)) send_number_ = *ours.sends;
    if (upTo(recv_number_, ours.recvs)) recv_number_ = *ours.recvs;
  }
  // Requests of those operations that this rank posts later (further steps, or all of them if the
  // peer was ahead) will fail when they are posted.
  const auto raise = [](std::optional<uint32_t>& limit, std::optional<uint32_t> to) {
    if (to && (!limit || upTo(*limit, to))) limit = to;
  };
  raise(given_up_.sends, ours.sends);
  raise(given_up_.recvs, ours.recvs);
  last_ = notice.error;
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
