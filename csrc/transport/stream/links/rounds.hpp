// The messages of one exchange, or of one step of a schedule, in rounds of a few pieces each.
//
// A message of gigabytes is thousands of operations, more than the host may be ahead (pacer.hpp),
// and streams may share a hardware queue, where what was enqueued first runs first. So whatever an
// operation waits for is enqueued by the peer before anything that waits for the operation. A round
// first tells the peers which landing places are free, which waits for nothing; then it sends,
// which waits for that or for slots that the peers' receives of the round before have emptied;
// receives come last. Hence a round has no more pieces than there are slots, and one message with a
// landing place.
#pragma once

#include <vector>

#include "transport/stream/links/link.hpp"

namespace hdpcomm::device {

class Rounds {
 public:
  // The fork must stay until run() has returned. Messages of a pair go in the order given.
  void receive(Link& link, const Incoming& message, Fork& fork);
  void send(Link& link, const std::byte* data, size_t bytes, Fork& fork);
  // To and at an offset of the receiver's landing zone.
  void put(Link& link, const std::byte* data, size_t bytes, size_t landing, Fork& fork);
  void land(Link& link, Fork& fork);

  // Enqueues everything.
  void run(const Pacer::WaitCheck& check);

 private:
  struct Message {
    Incoming incoming = {};
    const std::byte* data = nullptr;  // of a send
    size_t bytes = 0;
    Fork* fork = nullptr;
    bool lands = false;
    bool cleared = false;  // of one to receive: the peer was told that its place is free
    size_t landing = 0;
    Link::Progress progress = {};
  };
  // One direction of a pair: the pieces of a message come after those of the message before.
  struct Direction {
    Link* link;
    std::vector<Message> messages = {};
    size_t current = 0;
  };
  static std::vector<Message>& messagesOf(std::vector<Direction>& directions, Link& link);
  using Enqueue = int (*)(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static int receiveSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static int sendSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static void clear(std::vector<Direction>& directions, const Pacer::WaitCheck& check);
  static bool advance(std::vector<Direction>& directions, Enqueue enqueue,
                      const Pacer::WaitCheck& check);

  std::vector<Direction> in_;
  std::vector<Direction> out_;
};

}  // namespace hdpcomm::device
