// One rank's side of the failure protocol of a pair of ranks (transport.hpp): the numbers of their
// operations, what either rank gave up, and what that means for the requests of this rank.
//
// Both ranks count the operations of each direction. A rank that gives up sends the peer a notice:
// up to which number its sends, and its receives, have ended. On the peer, posted requests up to
// these numbers fail, and later ones fail when they are posted. Messages that are still on their
// way are recognised by their numbers and dropped. If both ranks gave up, perhaps in different
// calls, both continue counting from the later number.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/ring_queue.hpp"
#include "transport/failures.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

class PairFailures {
 public:
  uint32_t nextSend() noexcept { return ++send_number_; }
  uint32_t nextRecv() noexcept { return ++recv_number_; }

  // Whether the peer has given up the operation of this request. If so, fails the request, which
  // must not be posted.
  bool refuses(const SendRequest& request) const {
    return upTo(request.number, given_up_.sends) && refuse(request.completion);
  }
  bool refuses(const RecvRequest& request) const {
    return upTo(request.number, given_up_.recvs) && refuse(request.completion);
  }

  // This rank gives up an operation. Returns the notice to send to the peer.
  OwnNotice giveUp(const Error& error, const GiveUp& ends);
  // Whether this rank gave up the operation whose message carries the number.
  bool gaveUp(uint32_t recv_number) const { return upTo(recv_number, own_.recvs); }

  // The peer gave up: fails the posted requests that its notice ends. The elements of `sends` hold
  // a request each.
  template <typename... Sends>
  void receive(const Notice& notice, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    record(notice, fail(notice.error, notice.ours, recvs, sends...));
  }
  // The peer is gone: fails all posted requests.
  template <typename... Sends>
  void failAll(const Error& error, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    fail(error, {send_number_, recv_number_}, recvs, sends...);
  }

  // Transport::lost(), after the peer's notices have been received. ahead() returns a notice of
  // this very operation that is behind messages for which this rank has no receive yet.
  template <typename Ahead>
  std::optional<Error> lost(std::optional<uint32_t> send, std::optional<uint32_t> recv, bool needed,
                            const std::optional<Error>& gone, Ahead ahead) const {
    if (const Error* error = operation(send, recv)) return *error;
    if (const std::optional<Notice> notice = ahead()) return notice->error;
    if (!needed) return std::nullopt;
    const bool refused = (send && upTo(*send, given_up_.sends)) ||  //
                         (recv && upTo(*recv, given_up_.recvs));
    return refused ? last_ : gone;
  }

 private:
  static constexpr size_t kNotices = 64;  // older ones are forgotten

  bool refuse(Completion* completion) const;
  void record(const Notice& notice, bool failed_requests);
  // The failure of the very operation that has these numbers, or null.
  const Error* operation(std::optional<uint32_t> send, std::optional<uint32_t> recv) const;

  // Fails the requests up to these numbers. Returns whether there were any.
  template <typename... Sends>
  static bool fail(const Error& error, const GiveUp& up_to, RingQueue<RecvRequest>& recvs,
                   RingQueue<Sends>&... sends) {
    bool any = false;
    const auto fail_one = [&](uint32_t number, std::optional<uint32_t> limit, Completion* owner) {
      if (owner == nullptr || !upTo(number, limit)) return;  // a notice has no owner
      any = true;
      if (!owner->failure) owner->failure = error;
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
    return any;
  }

  uint32_t send_number_ = 0;  // of the last operation towards the peer
  uint32_t recv_number_ = 0;
  GiveUp given_up_;  // by the peer: sends it will not receive, receives for which it won't send
  GiveUp own_;       // numbers of this rank's last failed operation with the peer
  std::optional<Error> last_;    // error of the peer's last notice
  std::vector<Notice> notices_;  // the peer's last kNotices notices
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
  return peer.queue.any(sent) || peer.inflight.any(sent) || peer.recvs.any(received);
}

}  // namespace hdpcomm
