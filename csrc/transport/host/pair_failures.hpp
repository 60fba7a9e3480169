// One rank's side of the failure protocol of a pair of ranks (transport.hpp): the numbers of their
// operations, and what a failure means for the requests of this rank.
//
// Both ranks count the operations of each direction. After the first failure they may disagree
// about which operations belong together: a slow rank cannot be told from one that called something
// else. So the pair is out of step: all requests on it fail, and later ones are refused until
// resync(). A rank that gives up an operation sends the peer a notice with the numbers of its sends
// and receives; the peer's requests of that operation fail with the same error, all others as
// refused.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/ring_queue.hpp"
#include "transport/failures.hpp"
#include "transport/host/pair_resync.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

class PairFailures {
 public:
  // Called once, before all others.
  void connect(int rank, int peer) {
    rank_ = rank;
    peer_ = peer;
  }

  uint32_t nextSend() noexcept { return ++send_number_; }
  uint32_t nextRecv() noexcept { return ++recv_number_; }

  // Whether the pair is out of step. If so, fails the request, which must not be posted.
  bool refuses(const SendRequest& request) const {
    return upTo(request.number, refused_.sends) &&
           refuse(request.completion, upTo(request.number, given_up_.sends));
  }
  bool refuses(const RecvRequest& request) const {
    return upTo(request.number, refused_.recvs) &&
           refuse(request.completion, upTo(request.number, given_up_.recvs));
  }
  // The error of refused operations; none while the pair is in step.
  const std::optional<Error>& outOfStep() const { return refusal_; }

  // This rank gives up an operation, whose first send has the number `first_send`: fails the posted
  // requests of all others. Returns the notice to send to the peer, if it needs one.
  template <typename... Sends>
  std::optional<OwnNotice> giveUp(const Error& error, const GiveUp& ends,
                                  std::optional<uint32_t> first_send, RingQueue<RecvRequest>& recvs,
                                  RingQueue<Sends>&... sends) {
    markOutOfStep(error);
    fail(*refusal_, {}, *refusal_, recvs, sends...);
    return noticeOf(error, ends, first_send);
  }
  // The peer gave up: fails all posted requests. The elements of `sends` hold a request each.
  template <typename... Sends>
  void receive(const Notice& notice, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    record(notice);
    fail(notice.error, notice.ours, *refusal_, recvs, sends...);
  }
  // The peer is gone: fails all posted requests.
  template <typename... Sends>
  void failAll(const Error& error, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    fail(error, {}, error, recvs, sends...);
  }

  // This rank calls resync(): numbers count from 0 for operations submitted from now on, which must
  // not be posted before resynced().
  void restart();
  void resynced();
  // The peer calls resync(), and this rank has not: fails all posted requests.
  template <typename... Sends>
  void peerRestarted(RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    markOutOfStep(resyncOf(peer_));
    fail(*refusal_, {}, *refusal_, recvs, sends...);
  }

  // Transport::lost(), after the peer's notices have been received. ahead() returns a notice of
  // this very operation that is behind messages for which this rank has no receive yet.
  template <typename Ahead>
  std::optional<Error> lost(std::optional<uint32_t> send, std::optional<uint32_t> recv, bool needed,
                            const std::optional<Error>& gone, Ahead ahead) const {
    if (const Error* error = operation(send, recv)) return *error;
    if (const std::optional<Notice> notice = ahead()) return notice->error;
    if (!needed) return std::nullopt;
    const bool refused = (send && upTo(*send, refused_.sends)) ||  //
                         (recv && upTo(*recv, refused_.recvs));
    return refused ? refusal_ : gone;
  }

 private:
  static constexpr size_t kNotices = 64;  // older ones are forgotten

  bool refuse(Completion* completion, bool given_up) const;
  void markOutOfStep(const Error& error);
  Error resyncOf(int caller) const {
    return calledResync(caller, "",
                        {.rank = rank_, .peer = peer_, .op = {}, .ranks = {}, .seq = -1});
  }
  void record(const Notice& notice);
  std::optional<OwnNotice> noticeOf(const Error& error, const GiveUp& ends,
                                    std::optional<uint32_t> first_send);
  // The failure of the very operation that has these numbers, or null.
  const Error* operation(std::optional<uint32_t> send, std::optional<uint32_t> recv) const;

  // Fails the requests up to `up_to` with `error`, all later ones with `later`.
  template <typename... Sends>
  static void fail(const Error& error, const GiveUp& up_to, const Error& later,
                   RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    const auto fail_one = [&](uint32_t number, std::optional<uint32_t> limit, Completion* owner) {
      if (owner == nullptr || owner->failure) return;  // a notice has no owner
      owner->failure = upTo(number, limit) ? error : later;
    };
    const auto fail_sends = [&](auto& queue) {
      for (size_t i = 0; i < queue.size(); ++i) {
        fail_one(queue[i].request.number, up_to.sends, queue[i].request.completion);
      }
    };
    for (size_t i = 0; i < recvs.size(); ++i) {
      fail_one(recvs[i].number, up_to.recvs, recvs[i].completion);
    }
    (fail_sends(sends), ...);
  }

  int rank_ = -1;
  int peer_ = -1;
  uint32_t send_number_ = 0;  // of the last operation towards the peer
  uint32_t recv_number_ = 0;
  GiveUp refused_;                // while out of step: covers all numbers
  std::optional<Error> refusal_;  // set while out of step
  GiveUp given_up_;               // operations that the peer's first notice ended
  std::optional<Error> last_;     // that notice's error
  std::vector<Notice> notices_;   // the peer's last kNotices notices
  bool restarted_ = false;        // resync() was called and has not ended well
  bool notified_ = false;         // the peer knows that this rank is out of step
  std::optional<uint32_t> notified_first_send_;
};

// Queues a notice before the messages of later operations, which the peer would otherwise take for
// messages of this one. Messages that have begun() and earlier notices keep their places.
template <typename Out>
void queueNotice(RingQueue<Out>& queue, Out&& notice, std::optional<uint32_t> sends) {
  queue.push(std::move(notice));
  for (size_t i = queue.size() - 1; i > 0; --i) {
    const Out& before = queue[i - 1];
    if (before.begun() || upTo(before.request.number, sends)) break;
    std::swap(queue[i - 1], queue[i]);
  }
}

// Whether the operation has a request in flight with the peer, in either direction.
template <typename Peer>
bool holdsRequestOf(Peer& peer, const Completion* completion) {
  const auto sent = [&](const auto& out) { return out.request.completion == completion; };
  const auto received = [&](const RecvRequest& in) { return in.completion == completion; };
  return peer.resync.belongsTo(completion) || peer.queue.any(sent) || peer.inflight.any(sent) ||
         peer.recvs.any(received);
}

}  // namespace hdpcomm
