// Messages of a few KiB over links: all of an exchange are one kernel on the stream that needs
// them, which waits for the peers itself (kernels/relay.hpp).
//
// They have slots of their own, which kernels of several streams use in turn; so each kernel comes
// after the one before it, whatever its stream.
#pragma once

#include <optional>
#include <vector>

#include "kernels/relay.hpp"
#include "transport/stream/links/arena.hpp"
#include "transport/stream/links/link.hpp"

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

  // Enqueue on the stream. dtype and redop are those of messages with an operand.
  void exchange(const std::vector<Message>& sends, const std::vector<Message>& recvs, DType dtype,
                RedOp redop, Stream stream);
  void reduce(const Reduction& reduction, Stream stream);

  // For what is not to wait for the caller's stream.
  Lane& lane();
  void addStreams(std::vector<Stream>& streams) const;
  // Sets every flag that this rank's kernels may wait for, once.
  void release(Stream stream) const;

 private:
  struct Peer {
    int next_out = 0;
    int next_in = 0;
  };
  kernels::RelayItem put(const Message& message);
  kernels::RelayItem get(const Message& message);
  void begin(Stream stream);
  void end(Stream stream);

  DevicePtr device_;
  const Arena& arena_;
  int place_;
  size_t most_;
  std::vector<Peer> peers_;  // by place
  std::optional<Lane> lane_;
  OwnedEvent last_;  // the end of the last kernel
  std::optional<Stream> last_stream_;
  bool last_captured_ = false;
  bool used_ = false;
};

}  // namespace hdpcomm::device
