// Messages of a few KiB over links: all of an exchange are one kernel on the stream that needs
// them, which waits for the peers itself (kernels/relay.hpp).
//
// They have slots of their own, which kernels of several streams use in turn. So a message comes
// after the one before it of the same pair and direction, and after nothing else: a receive for
// which the peer is late holds up no send, and no other peer.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "kernels/relay.hpp"
#include "transport/stream/links/arena.hpp"
#include "transport/stream/links/mark.hpp"

namespace hdpcomm::device {

class SmallMessages {
 public:
  // A message to or from a place; of a received one, `operand` as Incoming says.
  struct Message {
    int place;
    std::byte* data;
    size_t bytes;
    const std::byte* operand = nullptr;
  };
  using Messages = std::vector<Message>;
  // An all-reduce or a reduce-scatter of the ranks at these places, `own` of them this one:
  // `parts[i]` of this rank go to the i-th.
  struct Reduction {
    const std::vector<int>& places;
    int own;
    std::vector<std::byte*> parts;
    std::byte* out;
    size_t count;
    DType dtype;
    RedOp redop;
  };

  SmallMessages(DevicePtr device, const Arena& arena, int place);

  bool fits(size_t bytes) const { return bytes <= most_ && most_ > 0; }

  // Whether the last message of the pair and direction is not known to come before work that the
  // stream is given now.
  bool pending(int place, bool out, Stream stream, bool captured);

  // Enqueue on the stream, after the last messages of their pairs and directions, and return the
  // end. dtype and redop are those of messages with an operand.
  MarkPtr exchange(const Messages& sends, const Messages& recvs, DType dtype, RedOp redop,
                   Stream stream);
  MarkPtr reduce(const Reduction& reduction, Stream stream);

  // Sets every flag that this rank's kernels may wait for, once.
  void release(Stream stream) const;

 private:
  struct Peer {
    std::array<int, 2> next_slot = {};  // to receive, to send
    std::array<MarkPtr, 2> last = {};
  };
  Peer& at(int place) { return peers_[static_cast<size_t>(place)]; }
  kernels::RelayItem put(const Message& message);
  kernels::RelayItem get(const Message& message);
  int nextSlot(int place, bool out);
  void follow(const Messages& messages, bool out, Stream stream, bool captured);
  // The end of what the stream holds now.
  MarkPtr mark(Stream stream, bool captured);

  DevicePtr device_;
  const Arena& arena_;
  int place_;
  size_t most_;
  std::shared_ptr<EventPool> events_;
  std::vector<Peer> peers_;  // by place
  bool used_ = false;
};

}  // namespace hdpcomm::device
