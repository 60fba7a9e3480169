// The queues between the framed transport and the carrier that moves its frames to other hosts.
//
// A carrier takes frames by tryNext() and sends them in order, and passes what it receives to
// deliver(). It knows nothing of messages, operations or failures: a frame is a head of fixed size
// and, if bulkBytes() is not 0, bytes that follow it. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

inline constexpr size_t kFrameHeadBytes = 1024;
inline constexpr size_t kFrameBulkBytes = 512 * 1024;  // at most

// The unit of transfer between hosts. The head holds a header and small payloads.
class Frame {
 public:
  // An empty frame, to receive into.
  Frame() = default;
  explicit Frame(size_t bulk_bytes) { allocate(bulk_bytes); }

  std::byte* head() noexcept { return head_; }
  const std::byte* head() const noexcept { return head_; }
  std::byte* bulk() noexcept { return bulk_.get(); }
  const std::byte* bulk() const noexcept { return bulk_.get(); }
  size_t bulkBytes() const noexcept { return bulk_bytes_; }
  // Call after the head has been received: allocates the bytes that follow it, and returns how
  // many. Throws Error if the head is not of this version.
  size_t expectBulk();
  void allocate(size_t bulk_bytes) {
    bulk_ = std::make_unique_for_overwrite<std::byte[]>(bulk_bytes);
    bulk_bytes_ = bulk_bytes;
  }

 private:
  alignas(64) std::byte head_[kFrameHeadBytes] = {};
  std::unique_ptr<std::byte[]> bulk_;
  size_t bulk_bytes_ = 0;
};
using FramePtr = std::shared_ptr<Frame>;

class FrameLink {
 public:
  FrameLink(int rank, int size);

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(peers_.size()); }

  // --- the carrier's side; any thread
  // The next frame to send to `peer`; nothing: there is none now. Null after the last one (the
  // goodbye), or if the peer was lost.
  std::optional<FramePtr> tryNext(int peer);
  // Passes on a frame from `peer`, in order. False: no more is wanted: it was the peer's last
  // frame, it told that the peer has our last one, or no rank sends it, and the peer is lost.
  bool deliver(int peer, FramePtr frame);
  // No more frames will be posted.
  bool closed() const;
  // Sets a function that is called, with locks held, whenever there may be a frame for a peer.
  void setCarrierWake(std::function<void(int peer)> wake);
  // Reports that the connection to `peer` broke.
  void lost(int peer, const std::string& why);

  // --- the transport's side
  struct Arrival {
    int peer;
    FramePtr frame;
  };
  void post(int peer, FramePtr frame);
  bool hasRoom(int peer) const;
  // Appends the frames that have arrived since the last call.
  void collect(std::vector<Arrival>& arrivals);
  // Breaks the connection: the peer sent what no rank sends, and nothing more is taken from it.
  void cutOff(int peer, const std::string& why);
  // Why the connection broke; empty while it holds.
  std::string lossOf(int peer) const;
  // Seconds without a frame since an unanswered ping; sends one if the peer has told nothing for a
  // while. 0: the peer answers.
  double silence(int peer);
  // What this rank tells about its moves in its answers to pings.
  void publishPulse(const Pulse& pulse);
  // What the peer told in its last answer; none if it has told nothing.
  std::optional<Pulse> pulse(int peer) const;
  // No more frames will be posted.
  void close();

  // --- counters; any thread
  // Where the other hosts' ranks count on this one: memory of the link's own, until told.
  void serveCounters(std::shared_ptr<CounterWords> words);
  std::shared_ptr<CounterWords> counterWords() const;
  struct Fetch {
    FetchRequest request;
    bool sent = false;
    std::optional<FetchResult> result;
  };
  std::shared_ptr<Fetch> startFetch(int peer, const FetchRequest& request);
  // See RemoteFetch::wait().
  std::optional<FetchResult> waitFetch(int peer, const Fetch& fetch, Clock::time_point until);
  // Nobody waits for it any more: it is not sent, if it has not been yet.
  void dropFetch(int peer, const Fetch& fetch);

  uint32_t ticket() const;
  void wait(uint32_t ticket, Clock::time_point until);
  void wake();  // ends a wait()
  // Sets a function that is called after every event, on the thread that caused it: wakes a rank
  // that sleeps elsewhere.
  void setWake(std::function<void()> wake);

 private:
  struct Peer {
    int rank = 0;
    std::deque<FramePtr> outbox;
    std::string loss;
    bool ended = false;         // its last frame has arrived
    bool heard_due = false;     // and it has not been told so
    bool said_goodbye = false;  // the last frame to it was posted
    bool pong_due = false;
    bool ping_due = false;
    Clock::time_point last_heard;   // any frame
    Clock::time_point last_answer;  // to a ping
    Clock::time_point ping_time;    // when the last ping was requested
    bool awaits_pong = false;
    uint32_t ping = 0;        // number of the last one
    uint32_t peers_ping = 0;  // of the peer's, which the next pong answers
    std::optional<Pulse> pulse;
    uint64_t waiting_units = 0;  // of its frames in arrivals_
    // When the last frame came that its rank has made, not its link by itself.
    Clock::time_point last_moved;

    std::deque<std::shared_ptr<Fetch>> fetches;  // without an answer, in order; first those sent
    size_t fetches_sent = 0;                     // of them
    uint64_t fetches_answered = 0;
    uint64_t peers_fetches = 0;       // that have arrived
    std::deque<FetchResult> answers;  // to the last of them
  };
  void signal(std::unique_lock<std::mutex>& lock);
  // All under the lock:
  bool isReady(const Peer& peer) const;
  void wakeCarrier(Peer& peer);
  FramePtr makePong(const Peer& peer) const;
  void takePong(int peer_rank, Peer& peer, Frame& frame);

  // frame_fetches.cpp, all under the lock
  bool answerDue(const Peer& peer) const;
  bool fetchDue(const Peer& peer) const;
  FramePtr makeFetch(Peer& peer);
  FramePtr makeAnswer(Peer& peer);
  // What is wrong with the frame after those before it; empty: nothing, and it was taken.
  std::string takeFetch(Peer& peer, const Frame& frame);
  std::string takeAnswer(Peer& peer, const Frame& frame);

  void lose(std::unique_lock<std::mutex>& lock, Peer& peer, const std::string& what);

  int rank_;
  mutable std::mutex mutex_;
  std::condition_variable for_transport_;
  std::condition_variable for_fetches_;
  std::deque<Peer> peers_;  // never moves its elements
  std::vector<Arrival> arrivals_;
  std::shared_ptr<const std::function<void()>> wake_;  // copied for each event
  std::function<void(int)> carrier_wake_;
  uint32_t events_ = 0;
  std::optional<Pulse> own_pulse_;
  std::shared_ptr<CounterWords> words_ = std::make_shared<CounterWords>();
  Clock::duration ping_after_;  // without an answer or a message from the peer
  bool closed_ = false;
};

// A transport that sends its messages as frames of the link.
std::unique_ptr<Transport> makeFramedTransport(std::shared_ptr<FrameLink> link);

}  // namespace hdpcomm
