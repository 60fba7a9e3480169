// Carries the frames of a link over TCP: one thread, and for each direction between two ranks a
// connection of its own, made when its first frame is sent.
//
// Whoever makes the connections (Python: addresses, deadlines, proofs of the job's secret) asks
// wanted() for peers, and hands over sockets that are connected and proven.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "transport/host/framed/frame_link.hpp"

namespace hdpcomm {

class SocketCarrier {
 public:
  // `grace_s`: after the link was closed, seconds without any progress until frames that no peer
  // takes are given up.
  SocketCarrier(std::shared_ptr<FrameLink> link, double grace_s);
  ~SocketCarrier();

  // --- for whoever makes connections; any thread
  // Waits for a peer to connect to, with which to call connected() or unreachable(). Nothing: the
  // carrier has ended.
  std::optional<int> wanted();
  // Takes a socket that this rank has connected to the peer; frames go out over it.
  void connected(int peer, Fd socket);
  void unreachable(int peer, const std::string& why);
  // Takes a socket that the peer has connected to this rank; frames come over it. False: there is
  // one already, or the carrier has ended.
  bool accepted(int peer, Fd socket);
  // Waits until all has been sent after the link was closed; false: it takes longer than this.
  bool join(double seconds);
  // Gives up what has not been sent.
  void stop();

 private:
  struct Outgoing {
    Fd socket;
    bool asked = false;  // for a connection
    bool ended = false;  // no more frames, or nobody to take them
    bool armed = false;  // told when the socket takes more
    FramePtr frame;      // whose bytes from `sent` on are next
    size_t sent = 0;
    int unacknowledged = 0;  // bytes, when last looked at
  };
  struct Incoming {
    Fd socket;
    FramePtr frame;
    size_t got = 0;  // bytes of it, the header's first
    size_t expected = 0;
    std::vector<std::byte> staged;  // bytes that were received for frames and are in none yet
  };
  struct Peer {
    Outgoing out;
    Incoming in;
    // `out` broke then, and why; frames of the peer may still come.
    std::optional<Clock::time_point> broken;
    std::string why;
  };
  struct Arrived {
    int peer;
    bool incoming;
    Fd socket;
  };

  void run();
  void carry();
  void loseAll(const std::string& why) noexcept;
  bool takeHandedOver();  // false: stopped
  void handle(uint64_t tag, uint32_t events);
  void send(int peer);
  bool receive(int peer);  // whether nothing is left to read
  bool useStaged(int peer, size_t bytes);
  bool deliver(int peer);
  void settleBroken();
  void lose(int peer, const std::string& why);
  bool allSent();
  void watch(int peer, bool incoming, bool writable, bool fresh);

  std::shared_ptr<FrameLink> link_;
  const Clock::duration grace_;
  Fd epoll_;
  Fd event_;
  // Only the carrier's thread uses these:
  std::deque<Peer> peers_;
  int broken_ = 0;              // peers whose `broken` is set
  Clock::time_point progress_;  // when bytes last went out

  std::mutex mutex_;
  std::condition_variable for_makers_;
  std::condition_variable for_joiners_;
  std::vector<int> dirty_;  // peers for which there may be frames
  std::vector<Arrived> arrived_;
  std::vector<bool> taken_;  // by peer: it has connected to this rank
  std::vector<std::pair<int, std::string>> unreachable_;
  std::deque<int> wanted_;
  bool stopped_ = false;
  bool ended_ = false;
  std::mutex joining_;
  std::thread thread_;
};

}  // namespace hdpcomm
