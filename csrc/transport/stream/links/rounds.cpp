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

void Rounds::land(Link& link, size_t bytes, Fork& fork) {
  messagesOf(in_, link).push_back({.bytes = bytes, .fork = &fork, .lands = true});
}

int Rounds::receiveSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check) {
  if (!message.lands) {
    return link.receive(message.incoming, message.progress, pieces, *message.fork, check);
  }
  message.progress.complete = true;
  return link.land(message.bytes, *message.fork, check);
}

int Rounds::sendSome(Link& link, Message& message, int pieces, const Pacer::WaitCheck& check) {
  if (!message.lands) {
    return link.send(message.data, message.bytes, message.progress, pieces, *message.fork, check);
  }
  message.progress.complete = true;
  return link.put(message.data, message.bytes, message.landing, *message.fork, check);
}

// True if anything is left.
bool Rounds::advance(std::vector<Direction>& directions, Enqueue enqueue,
                     const Pacer::WaitCheck& check) {
  bool left = false;
  for (Direction& direction : directions) {
    int pieces = kPieces;
    while (direction.current < direction.messages.size() && pieces > 0) {
      Message& message = direction.messages[direction.current];
      pieces -= enqueue(*direction.link, message, pieces, check);
      if (message.progress.complete) ++direction.current;
    }
    left = left || direction.current < direction.messages.size();
  }
  return left;
}

void Rounds::run(const Pacer::WaitCheck& check) {
  bool left = true;
  while (left) {
    left = advance(in_, receiveSome, check);
    left |= advance(out_, sendSome, check);
  }
}

}  // namespace hdpcomm::device
