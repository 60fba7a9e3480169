#pragma once

#include <string>
#include <vector>

#include "base/ring_queue.hpp"
#include "transport/host/pair_failures.hpp"
#include "transport/host/shm/heap.hpp"
#include "transport/host/shm/segment.hpp"

namespace hdpcomm::shm {

// A message or a failure notice that waits for room on its channel.
struct PendingSend {
  SendRequest request;
  size_t offset = 0;  // bytes already sent in fragments
  Kind kind = Kind::kInline;
  OwnNotice notice;  // kFailure
  Marker marker;     // kMarker

  bool begun() const { return kind >= Kind::kFailure || offset > 0; }
};

// A message on its channel whose request ends when the receiver has consumed it.
struct Inflight {
  uint64_t index = 0;  // on the channel
  SendRequest request;
};

struct Peer {
  int rank = -1;
  Channel* out = nullptr;
  Channel* in = nullptr;
  std::byte* out_payload = nullptr;
  std::byte* in_payload = nullptr;
  Control* control = nullptr;
  bool same_process = false;
  bool used = false;
  bool in_active_list = false;

  uint64_t sent = 0;           // messages published on `out`
  uint64_t consumed_seen = 0;  // last value read from out->consumed
  uint64_t payload_sent = 0;   // bytes of the payload ring used so far, in total
  uint64_t payload_taken_seen = 0;
  uint64_t received = 0;  // messages consumed from `in`
  uint64_t payload_received = 0;
  size_t fragment_offset = 0;  // of the message at the front of `recvs`
  PairFailures failures;
  PairResync resync;

  RingQueue<PendingSend> queue;
  RingQueue<Inflight> inflight;
  RingQueue<RecvRequest> recvs;

  std::optional<PulseRecord> pulse;  // as last read

  PeerHeap heap;  // mapped at the first message from it

  // Set when the peer wrote what no rank of this version writes: it is lost from then on, and
  // `out` and `in` are this, where nothing ever arrives and there is never room.
  std::string broken;
  std::unique_ptr<Channel> dead;

  bool active() const {
    return !queue.empty() || !inflight.empty() || !recvs.empty() || resync.underWay();
  }
};

class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<Segment> segment, int rank, std::vector<int> members);
  ~ShmTransport() override;

  const char* name() const noexcept override { return "shm"; }
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(segment_->layout().num_ranks); }
  uint32_t nextSendNumber(int peer) override { return peers_[peer].failures.nextSend(); }
  uint32_t nextRecvNumber(int peer) override { return peers_[peer].failures.nextRecv(); }
  void postSend(const SendRequest& request) override;
  void postRecv(const RecvRequest& request) override;
  bool progress() override;
  void cancel(const Completion* completion) override;
  std::vector<int> awaited(const Completion* completion) override;
  void notifyFailure(int peer, const Error& error, std::optional<uint32_t> first_send,
                     std::optional<uint32_t> send_number,
                     std::optional<uint32_t> recv_number) override;
  std::optional<Error> outOfStep(int peer) override { return peers_[peer].failures.outOfStep(); }
  void restartNumbers(int peer) override { peers_[peer].failures.restart(); }
  void postResync(int peer, Completion* completion) override;
  void rejectUnexpected(int peer, uint32_t number, const Call& call,
                        Completion* completion) override;
  std::optional<Error> lost(int peer, std::optional<uint32_t> send_number,
                            std::optional<uint32_t> recv_number, bool needed) override;
  void checkPeers() override;
  std::optional<Error> departure(int peer) override;
  uint32_t idleTicket() override;
  void idle(uint32_t ticket, Clock::time_point until) override;
  std::function<void()> waker() override;
  bool oversubscribed() const noexcept override { return oversubscribed_; }
  std::shared_ptr<std::byte> allocate(size_t bytes) override;
  WaitPlace* waitPlace(int rank) override { return &segment_->control(rank).wait; }
  std::shared_ptr<CounterWords> counterWords(int rank) override {
    return {segment_, &segment_->control(rank).counters};
  }
  uint64_t moves() const override;
  void publishPulse(const Pulse& pulse) override;
  std::optional<Pulse> pulse(int peer) override;
  Stats stats() const override;
  void close(const std::string& reason) noexcept override;

  void waitAllReady(const ShmJoining& joining);

 private:
  // shm_send.cpp
  bool inSharedHeap(const Peer& peer, const SendRequest& request) const;
  bool needsFragments(const Peer& peer, const SendRequest& request) const;
  bool tryPush(Peer& peer, PendingSend& send);
  bool pushMessage(Peer& peer, const SendRequest& request);  // in one piece
  bool pushFragments(Peer& peer, PendingSend& send);
  bool pushFailure(Peer& peer, const OwnNotice& notice);
  bool pushMarker(Peer& peer, const Marker& marker);
  void sendMarker(Peer& peer, const Marker& marker);
  void revoke(Peer& peer, uint32_t first_send);
  void completeAccepted(Peer& peer);
  Slot* claimSlot(Peer& peer);
  std::byte* claimPayload(Peer& peer, size_t bytes, size_t rest, uint64_t* offset);
  void publish(Peer& peer, Slot& slot);
  void completeInflight(Peer& peer);
  void withdraw(Peer& peer, const Inflight& inflight);
  void cutOff(Peer& peer, const char* field, uint64_t value);  // for such a value

  // shm_recv.cpp
  Slot* published(const Peer& peer, uint64_t index) const;
  bool drain(Peer& peer);                // true: something was consumed
  bool deliver(Peer& peer, Slot& slot);  // false: nothing more can be consumed now
  // Null if the heap cannot be mapped, or if the message would not lie in it: then the peer is cut
  // off.
  const std::byte* sharedBytes(Peer& peer, uint64_t address, size_t bytes);
  bool copyDirect(Peer& peer, const Slot& slot, const RecvRequest& request);
  void drop(Peer& peer, Slot& slot);
  // Where a piece of a message lies in the payload ring; null, and the peer cut off, where it would
  // not lie there as a whole.
  const std::byte* payloadOf(Peer& peer, const Slot& slot, size_t bytes);
  // Null where it is malformed.
  std::optional<Notice> noticeIn(const Peer& peer, const Slot& slot) const;
  // The first notice on the channel for which wanted(notice) holds.
  template <typename Wanted>
  std::optional<Notice> noticeAhead(const Peer& peer, Wanted wanted) const {
    for (uint64_t i = peer.received; i < peer.received + kSlots; ++i) {
      const Slot* slot = published(peer, i);
      if (slot == nullptr) break;
      if (readOnce(slot->kind) != Kind::kFailure) continue;
      const std::optional<Notice> notice = noticeIn(peer, *slot);
      if (notice && wanted(*notice)) return notice;
    }
    return std::nullopt;
  }
  void receiveControl(Peer& peer, const Slot& slot);
  bool takeRevoked(Peer& peer, const Slot& slot, const RecvRequest& request);
  void reject(Peer& peer, Slot& slot, const RecvRequest& request);
  void consume(Peer& peer, const Slot& slot);

  // shm_join.cpp
  bool present(int member) const;
  void waitForMembers(const ShmJoining& joining);
  std::optional<Error> lostInJoining(const ShmJoining& joining) const;
  void probePeer(Peer& peer);

  // shm_transport.cpp
  void activate(Peer& peer) {
    if (peer.in_active_list) return;
    peer.in_active_list = true;
    active_.push_back(peer.rank);
  }
  void ringDoorbell(Control& control);
  std::optional<Error> goneError(const Peer& peer, bool awaited = true) const;
  bool processAlive(const Control& control) const;
  std::string closingReason(const Control& control) const;

  std::shared_ptr<Segment> segment_;
  int rank_;
  std::vector<int> members_;  // ranks that exchange messages, this one included
  std::vector<Peer> peers_;
  std::vector<int> active_;  // peers with requests
  std::vector<std::byte> scratch_;
  std::shared_ptr<Heap> heap_;  // made by the first allocate()
  bool no_heap_ = false;        // the system refused it
  MessageCounts stats_;
  size_t eager_bytes_;
  bool oversubscribed_ = false;
  bool barriers_ = false;  // membarrier() works here, and other ranks' barriers reach this process
  bool closed_ = false;
};

}  // namespace hdpcomm::shm
