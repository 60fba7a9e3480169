// The mailbox between the framed transport and whatever carries its frames to other hosts: a torch
// process group driven from Python, say.
//
// A carrier needs, for every peer, a thread that takes frames by next() and sends them in order,
// and one that receives frames and hands them in by deliver(). It knows nothing of messages,
// operations or failures: a frame is a fixed head and, if bulkBytes() is not 0, bytes that follow
// it. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

inline constexpr size_t kFrameHeadBytes = 1024;
inline constexpr size_t kFrameBulkBytes = 512 * 1024;  // at most

// What crosses between hosts at once. The head holds a header and small payloads.
class Frame {
 public:
  // An empty one to receive into.
  Frame() = default;
  explicit Frame(size_t bulk_bytes) { allocate(bulk_bytes); }

  std::byte* head() noexcept { return head_; }
  const std::byte* head() const noexcept { return head_; }
  std::byte* bulk() noexcept { return bulk_.get(); }
  const std::byte* bulk() const noexcept { return bulk_.get(); }
  size_t bulkBytes() const noexcept { return bulk_bytes_; }
  // After the head has been received: makes room for the bytes that follow it. Throws Error when
  // the head is none of this version.
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
  // The next frame for `peer`, in order; waits for one. Null after the last one (the goodbye), or
  // when the peer was lost.
  FramePtr next(int peer);
  // Hands in what came from `peer`, in order. False: it was the peer's last frame.
  bool deliver(int peer, FramePtr frame);
  // Returns when no more frames will be posted.
  void waitClosed();
  // The connection to `peer` broke.
  void lost(int peer, const std::string& why);

  // --- the transport's side
  struct Arrival {
    int peer;
    FramePtr frame;
  };
  void post(int peer, FramePtr frame);
  bool hasRoom(int peer) const;
  // Appends what has come since the last call.
  void collect(std::vector<Arrival>& arrivals);
  // Empty while the connection holds.
  std::string lossOf(int peer) const;
  // Seconds without a sign of life after one was asked for; asks for one. 0: the peer answers.
  double silence(int peer);
  // No more frames will be posted.
  void close();

  uint32_t ticket() const;
  void wait(uint32_t ticket, Clock::time_point until);
  void wake();  // ends a wait()
  // Called after every event, on the thread that caused it; for whoever sleeps elsewhere.
  void setWake(std::function<void()> wake);

 private:
  struct Peer {
    std::condition_variable for_carrier;
    std::deque<FramePtr> outbox;
    std::string loss;
    bool ended = false;  // its last frame came
    bool pong_due = false;
    bool ping_due = false;
    Clock::time_point heard = Clock::now();
    Clock::time_point asked;  // when the unanswered ping was asked for
    bool asking = false;
  };
  void signal(std::unique_lock<std::mutex>& lock);

  int rank_;
  mutable std::mutex mutex_;
  std::condition_variable for_transport_;
  std::deque<Peer> peers_;  // never moves its elements
  std::vector<Arrival> arrivals_;
  std::shared_ptr<const std::function<void()>> wake_;  // copied for each event
  uint32_t events_ = 0;
  bool closed_ = false;
};

// A transport whose messages travel as the link's frames. `name` is what the user sees.
std::unique_ptr<Transport> makeFramedTransport(std::shared_ptr<FrameLink> link,
                                               const std::string& name);

}  // namespace hdpcomm
