// Messages over a FrameLink: the rules of transport.hpp without shared memory.
//
// Only this class, under the World's lock, accesses requests and their buffers; the link's threads
// access frames. So a cancelled request is forgotten here and its buffers are free at once, even if
// the carrier still holds frames of it; pieces that arrive later are dropped by their number.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/ring_queue.hpp"
#include "transport/host/framed/frame_check.hpp"
#include "transport/host/pair_failures.hpp"

namespace hdpcomm::framed {

// A message to be sent.
struct Outgoing {
  SendRequest request;
  uint64_t index = 0;
  size_t offset = 0;  // bytes passed to the link
  bool started = false;
};

struct Peer {
  int rank = -1;
  bool used = false;
  bool in_active_list = false;
  PairFailures failures;
  PairResync resync;
  std::string farewell;  // text of the peer's goodbye
  bool gone = false;     // the goodbye has arrived
  bool cut_off = false;  // it sent what no rank sends: its further frames are ignored

  ArrivingMessages arriving;
  uint64_t next_index = 0;  // of the next message to the peer
  uint64_t sent_units = 0;
  uint64_t credited_units = 0;      // that the peer has consumed, as it announced
  uint64_t consumed_units = 0;      // of the peer's messages
  uint64_t announced_units = 0;     // consumed_units, as the peer last got them
  std::optional<uint64_t> refused;  // the rejected message, whose further pieces are dropped

  RingQueue<Outgoing> queue;
  RingQueue<Outgoing> inflight;  // sent, and not yet accepted by the peer
  RingQueue<RecvRequest> recvs;
  RingQueue<FramePtr> incoming;  // data, notices and markers that were not consumed yet

  bool active() const {
    return !queue.empty() || !inflight.empty() || !recvs.empty() || resync.underWay();
  }
};

class FramedTransport final : public Transport {
 public:
  explicit FramedTransport(std::shared_ptr<FrameLink> link);
  ~FramedTransport() override;

  const char* name() const noexcept override { return "tcp"; }
  int rank() const noexcept override { return link_->rank(); }
  int size() const noexcept override { return link_->size(); }
  uint32_t nextSendNumber(int peer) override { return at(peer).failures.nextSend(); }
  uint32_t nextRecvNumber(int peer) override { return at(peer).failures.nextRecv(); }
  void postSend(const SendRequest& request) override;
  void postRecv(const RecvRequest& request) override;
  bool progress() override;
  void rejectUnexpected(int peer, uint32_t number, const Call& call,
                        Completion* completion) override;
  void cancel(const Completion* completion) override;
  std::vector<int> awaited(const Completion* completion) override;
  void notifyFailure(int peer, const Error& error, std::optional<uint32_t> first_send,
                     std::optional<uint32_t> send_number,
                     std::optional<uint32_t> recv_number) override;
  std::optional<Error> outOfStep(int peer) override { return at(peer).failures.outOfStep(); }
  void restartNumbers(int peer) override { at(peer).failures.restart(); }
  void postResync(int peer, Completion* completion) override;
  std::optional<Error> lost(int peer, std::optional<uint32_t> send_number,
                            std::optional<uint32_t> recv_number, bool needed) override;
  void checkPeers() override;
  std::optional<Error> departure(int peer) override;
  uint32_t idleTicket() override { return link_->ticket(); }
  void idle(uint32_t ticket, Clock::time_point until) override { link_->wait(ticket, until); }
  std::function<void()> waker() override;
  // The carrier's threads need the cores that a busy wait would take.
  bool oversubscribed() const noexcept override { return true; }
  std::shared_ptr<CounterWords> counterWords(int rank) override;
  std::unique_ptr<RemoteFetch> startFetch(int rank, const FetchRequest& request) override;
  uint64_t moves() const override;
  void publishPulse(const Pulse& pulse) override { link_->publishPulse(pulse); }
  std::optional<Pulse> pulse(int peer) override { return link_->pulse(peer); }
  Stats stats() const override;
  void close(const std::string& reason) noexcept override;

 private:
  Peer& at(int peer) { return peers_[static_cast<size_t>(peer)]; }
  void activate(Peer& peer);
  void sendControl(Peer& peer, Header header, const std::string& text = {});
  void sendMarker(Peer& peer, const Marker& marker);

  // framed_transport.cpp
  void push(Peer& peer);
  bool pushPiece(Peer& peer, Outgoing& out);
  std::optional<Error> goneError(const Peer& peer, bool awaited = true);

  // framed_receive.cpp
  void route(Peer& peer, FramePtr frame);
  // What is wrong with a frame after those before it.
  std::optional<std::string> outOfPlace(Peer& peer, const Header& header) const;
  void dropRevoked(Peer& peer, uint32_t first_send);
  void receiveMarker(Peer& peer, const Header& header);
  void endAccepted(Peer& peer, const Header& header);
  void endRejected(Peer& peer, const Header& header);
  void drain(Peer& peer);
  bool deliver(Peer& peer, Frame& frame, const Header& header);
  void reject(Peer& peer, const Header& header, const RecvRequest& request);
  Notice noticeIn(const Peer& peer, Frame& frame) const;
  std::optional<Notice> noticeAhead(Peer& peer, std::optional<uint32_t> send_number,
                                    std::optional<uint32_t> recv_number) const;
  void consume(Peer& peer, const Header& header);
  void drop(Peer& peer, const Header& header);

  std::shared_ptr<FrameLink> link_;
  std::vector<Peer> peers_;
  std::vector<int> active_;  // peers with requests
  std::vector<FrameLink::Arrival> arrivals_;
  MessageCounts stats_;
  double silence_s_;
  bool closed_ = false;
};

}  // namespace hdpcomm::framed
