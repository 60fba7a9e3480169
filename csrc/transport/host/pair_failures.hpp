// The failure protocol of one pair of ranks (transport.hpp), as one of the two keeps it: numbers of
// operations, what either of them gave up, and what that means for the requests of this rank.
//
// Both ranks count the operations of each direction. Who gives one up tells the peer up to which of
// its sends and receives; there, what is posted of them fails, and what is posted later fails at
// once. Messages that are on their way all the same are known by their numbers, and dropped. If
// both gave up, perhaps in different calls, they go on counting from the later one.
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

  // Whether the peer has given up the operation of this request; then it has failed, and is not
  // posted.
  bool refuses(const SendRequest& request) const {
    return upTo(request.number, given_up_.sends) && refuse(request.completion);
  }
  bool refuses(const RecvRequest& request) const {
    return upTo(request.number, given_up_.recvs) && refuse(request.completion);
  }

  // This rank gives up. What is returned is to be told to the peer.
  OwnNotice giveUp(const Error& error, const GiveUp& ends);
  // Whether this rank gave up the operation whose message carries the number.
  bool gaveUp(uint32_t recv_number) const { return upTo(recv_number, own_.recvs); }

  // The peer gave up: fails what is posted of that. `sends` are queues of what holds a request.
  template <typename... Sends>
  void hear(const Notice& notice, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    record(notice, fail(notice.error, notice.ours, recvs, sends...));
  }
  // Fails all that is posted: the peer is gone.
  template <typename... Sends>
  void failAll(const Error& error, RingQueue<RecvRequest>& recvs, RingQueue<Sends>&... sends) {
    fail(error, {send_number_, recv_number_}, recvs, sends...);
  }

  // Transport::lost(), once what the peer sent has been heard. ahead(): a notice of this very
  // operation behind messages that this rank does not take yet (it counts for this one only).
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
  void record(const Notice& notice, bool met);
  // The failure of the very operation that has these numbers, or null.
  const Error* operation(std::optional<uint32_t> send, std::optional<uint32_t> recv) const;

  // Returns whether there were any.
  template <typename... Sends>
  static bool fail(const Error& error, const GiveUp& up_to, RingQueue<RecvRequest>& recvs,
                   RingQueue<Sends>&... sends) {
    bool met = false;
    const auto fail_one = [&](uint32_t number, std::optional<uint32_t> limit, Completion* owner) {
      if (owner == nullptr || !upTo(number, limit)) return;  // a notice has no owner
      met = true;
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
    return met;
  }

  uint32_t send_number_ = 0;  // of the last operation towards the peer
  uint32_t recv_number_ = 0;
  GiveUp given_up_;  // by the peer: the sends that it does not take, the receives it does not serve
  GiveUp own_;       // numbers of this rank's last failed operation with the peer
  std::optional<Error> last_;    // that the peer told
  std::vector<Notice> notices_;  // of the peer
};

// Puts a notice before the messages of later operations, which the peer must not take for this
// one's. What has begun() stays where it is, as earlier notices do.
template <typename Out>
void queueNotice(RingQueue<Out>& queue, Out&& notice, std::optional<uint32_t> sends) {
  queue.push(std::move(notice));
  for (size_t i = queue.size() - 1; i > 0; --i) {
    const Out& before = queue[i - 1];
    if (before.begun() || upTo(before.request.number, sends)) break;
    std::swap(queue[i - 1], queue[i]);
  }
}

// Whether a request of the operation is under way with the peer, out or in.
template <typename Peer>
bool holdsRequestOf(Peer& peer, const Completion* completion) {
  const auto sent = [&](const auto& out) { return out.request.completion == completion; };
  const auto received = [&](const RecvRequest& in) { return in.completion == completion; };
  return peer.queue.any(sent) || peer.inflight.any(sent) || peer.recvs.any(received);
}

}  // namespace hdpcomm
