#include "transport/stream/links/rounds.hpp"

#include <algorithm>

namespace hdpcomm::device {

std::vector<Rounds::Message>& Rounds::messagesOf(std::vector<Direction>& directions, Link& link) {
  const auto found = std::find_if(directions.begin(), directions.end(),
                                  [&](const Direction& each) { return each.link == &link; });
  return (found != directions.end() ? *found : directions.emplace_back(Direction{&link})).messages;
}

void Rounds::receive(Link& link, const Incoming& message, Fork& fork) {
  messagesOf(in_, link).push_back({.incoming = message, .fork = &fork});
}

void Rounds::send(Link& link, const std::byte* data, size_t bytes, Fork& fork) {
  messagesOf(out_, link).push_back({.data = data, .bytes = bytes, .fork = &fork});
}

void Rounds::put(Link& link, const std::byte* data, size_t bytes, size_t landing, Fork& fork) {
  messagesOf(out_, link)
      .push_back({.data = data, .bytes = bytes, .fork = &fork, .lands = true, .landing = landing});
}

void Rounds::land(Link& link, Fork& fork) {
  messagesOf(in_, link).push_back({.fork = &fork, .lands = true});
}

int Rounds::receiveSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check) {
  if (!message.lands) {
    return link.receive(message.incoming, message.progress, pieces, *message.fork, check);
  }
  message.progress.complete = true;
  link.land(message.cleared, *message.fork, check);
  return 1;
}

int Rounds::sendSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check) {
  if (!message.lands) {
    return link.send(message.data, message.bytes, message.progress, pieces, *message.fork, check);
  }
  message.progress.complete = true;
  link.put(message.data, message.bytes, message.landing, *message.fork, check);
  return 1;
}

// Tells the peers which landing places of their next messages are free.
void Rounds::clear(std::vector<Direction>& directions, const Pacer::WaitCheck& check) {
  for (Direction& direction : directions) {
    if (direction.current == direction.messages.size()) continue;
    Message& message = direction.messages[direction.current];
    if (!message.lands || message.cleared) continue;
    direction.link->clear(*message.fork, check);
    message.cleared = true;
  }
}

// True if anything is left. A message with a landing place is a direction's whole round, or none of
// it: before it was cleared, it waits for the next.
bool Rounds::advance(std::vector<Direction>& directions, Enqueue enqueue,
                     const Pacer::WaitCheck& check) {
  bool left = false;
  for (Direction& direction : directions) {
    int pieces = direction.link->numSlots();
    bool begun = false;
    while (direction.current < direction.messages.size() && pieces > 0) {
      Message& message = direction.messages[direction.current];
      if (message.lands && begun) break;
      begun = true;
      pieces -= enqueue(*direction.link, message, pieces, check);
      if (message.lands) pieces = 0;
      if (message.progress.complete) ++direction.current;
    }
    left = left || direction.current < direction.messages.size();
  }
  return left;
}

void Rounds::run(const Pacer::WaitCheck& check) {
  bool left = true;
  while (left) {
    if (!out_.empty()) clear(in_, check);  // else it goes with the wait for the message
    left = advance(out_, sendSome, check);
    left |= advance(in_, receiveSome, check);
  }
}

}  // namespace hdpcomm::device
