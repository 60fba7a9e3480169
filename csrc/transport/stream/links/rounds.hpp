// The messages of one exchange, or of one step of a schedule, in rounds of a few pieces each.
//
// A message of gigabytes is thousands of operations, more than the host may be ahead (pacer.hpp).
// If all of a receive came before the first piece of a send, two ranks that exchange such messages
// would wait for each other's sends for ever. In rounds, what a rank waits for at piece i are
// pieces far before i, and every peer that is in the exchange has enqueued these: the rank that is
// furthest behind can always go on.
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
  void land(Link& link, size_t bytes, Fork& fork);

  // Enqueues everything: in each round first receives, then sends.
  void run(const Pacer::WaitCheck& check);

 private:
  struct Message {
    Incoming incoming = {};
    const std::byte* data = nullptr;  // of a send
    size_t bytes = 0;
    Fork* fork = nullptr;
    bool lands = false;
    size_t landing = 0;
    Link::Progress progress = {};
  };
  // One direction of a pair: the pieces of a message come after those of the message before.
  struct Direction {
    Link* link;
    std::vector<Message> messages = {};
    size_t current = 0;
  };
  static constexpr int kPieces = 8;  // of a direction in a round

  static std::vector<Message>& messagesOf(std::vector<Direction>& directions, Link& link);
  using Enqueue = int (*)(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static int receiveSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static int sendSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check);
  static bool advance(std::vector<Direction>& directions, Enqueue enqueue,
                      const Pacer::WaitCheck& check);

  std::vector<Direction> in_;
  std::vector<Direction> out_;
};

}  // namespace hdpcomm::device
