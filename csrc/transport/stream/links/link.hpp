// This rank's end of a pair of ranks: turns messages into work of the pair's streams.
//
// A message goes through slots, in pieces of a slot, or to a landing place; both sides derive the
// pieces from its size, so they need not agree on them by messages. Each piece belongs to one lane,
// a stream of its own in each direction, so that several copy engines share a large message and a
// receive never queues behind a send. Nothing here waits on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "base/call.hpp"
#include "transport/stream/links/arena.hpp"

namespace hdpcomm::device {

// A stream and the event that marks how far it has come.
class Lane {
 public:
  explicit Lane(const DevicePtr& device)
      : stream_(device, device->createStream()), event_(device, device->createEvent()) {}
  Stream stream() const { return stream_.get(); }
  Event event() const { return event_.get(); }

 private:
  OwnedStream stream_;
  OwnedEvent event_;
};

// Lanes that run beside a stream, from one point of the stream on.
class Fork {
 public:
  // `begin` was recorded at that point, and must not be recorded again before the last enter().
  Fork(DeviceApi& device, Event begin) : device_(&device), begin_(begin) {}

  Stream enter(Lane& lane);
  // Work of `stream` from now on comes after all work of the lanes.
  void join(Stream stream);
  // The lanes that work was given to.
  const std::vector<Lane*>& lanes() const { return lanes_; }

 private:
  DeviceApi* device_;
  Event begin_;
  std::vector<Lane*> lanes_;
};

struct Incoming {
  std::byte* data = nullptr;
  size_t bytes = 0;
  const std::byte* operand = nullptr;  // null: data = message; else data = operand op message
  DType dtype = DType::kUint8;
  RedOp redop = RedOp::kNone;
};

class Link {
 public:
  Link(DevicePtr device, const Arena& arena, int rank, int peer);

  void send(const std::byte* data, size_t bytes, Fork& fork);
  void receive(const Incoming& message, Fork& fork);
  // Send to, and receive at, an offset of the receiver's landing zone.
  void put(const std::byte* data, size_t bytes, size_t offset, Fork& fork);
  void land(size_t bytes, Fork& fork);

  // The streams of its lanes.
  void addStreams(std::vector<Stream>& streams) const;
  // Sets every flag of the pair that this rank's streams may wait for, once.
  void release(Stream stream) const;

 private:
  struct Piece {
    size_t offset;
    size_t bytes;
  };
  std::vector<Piece> pieces(size_t bytes) const;
  std::vector<Piece> shares(size_t bytes) const;
  void sendPiece(const std::byte* data, size_t bytes, int slot, Stream stream);
  void receivePiece(const Incoming& message, const Piece& piece, int slot, Stream stream);
  Lane& lane(std::vector<Lane>& lanes, int index);

  DevicePtr device_;
  const Arena& arena_;
  int rank_;
  int peer_;
  PairFlags& mine_;    // in this rank's block
  PairFlags& theirs_;  // in the peer's block
  std::vector<Lane> out_;
  std::vector<Lane> in_;
  int next_out_slot_ = 0;
  int next_in_slot_ = 0;
};

}  // namespace hdpcomm::device
