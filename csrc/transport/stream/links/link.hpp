// This rank's end of a pair of ranks: turns messages into work of the pair's streams.
//
// A message goes through slots, in pieces of a slot, or to a landing place, in one; both sides
// derive the pieces from its size, so they need not agree on them by messages. Each piece belongs
// to one lane, a stream of its own in each direction, so that the copies into slots and out of them
// overlap and a receive never queues behind a send. The host waits only when it is far ahead of a
// lane (pacer.hpp).
//
// Messages to landing places follow those of their pair and direction, and may be on any stream.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/call.hpp"
#include "transport/stream/links/arena.hpp"
#include "transport/stream/links/mark.hpp"
#include "transport/stream/pacer.hpp"

namespace hdpcomm::device {

// A stream and the event that marks how far it has come.
class Lane {
 public:
  explicit Lane(const DevicePtr& device)
      : stream_(device, device->createStream()),
        event_(device, device->createEvent()),
        pacer_(device) {}
  Stream stream() const { return stream_.get(); }
  Event event() const { return event_.get(); }
  // Call before operations are enqueued on the stream (pacer.hpp).
  void pass(size_t operations, const Pacer::WaitCheck& check) {
    pacer_.pass(stream_.get(), operations, check);
  }

 private:
  OwnedStream stream_;
  OwnedEvent event_;
  Pacer pacer_;
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

// Operations on flags of a stream that go to the driver in one call.
class FlagBatch {
 public:
  // Wait until it is 1, and set it to 0.
  void take(uint32_t* flag, Site site = std::source_location::current());
  void set(uint32_t* flag, Site site = std::source_location::current());
  void flush(DeviceApi& device, Stream stream);

 private:
  std::array<FlagOp, 3> ops_;
  size_t count_ = 0;
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
  using WaitCheck = Pacer::WaitCheck;

  // What of a message is enqueued.
  struct Progress {
    size_t bytes = 0;
    bool complete = false;
  };

  Link(DevicePtr device, const Arena& arena, int rank, int peer);

  // Enqueue at most `pieces` more pieces of a message, and return how many.
  int send(const std::byte* data, size_t bytes, Progress& progress, int pieces, Fork& fork,
           const WaitCheck& check);
  int receive(const Incoming& message, Progress& progress, int pieces, Fork& fork,
              const WaitCheck& check);
  // Send to, and receive at, an offset of the receiver's landing zone, on a lane. The receiver
  // tells that the place is free, by clear() or, if that was not called, before it waits.
  void put(const std::byte* data, size_t bytes, size_t offset, Fork& fork, const WaitCheck& check);
  void clear(Fork& fork, const WaitCheck& check);
  void land(bool cleared, Fork& fork, const WaitCheck& check);

  // The parts of these, for a stream that follows the landing messages of the direction. Whoever
  // enqueued a message gives its end.
  void followLandings(bool out, Stream stream, bool captured) {
    follow(*device_, last_landing_[out], stream, captured);
  }
  void markLanding(bool out, MarkPtr end) { last_landing_[out] = std::move(end); }
  void tellClear(FlagBatch& flags) { flags.set(&theirs_.clear); }
  void awaitClear(FlagBatch& flags) { flags.take(&mine_.clear); }
  void copyToLanding(const std::byte* data, size_t bytes, size_t offset, Stream stream);
  void tellLanded(FlagBatch& flags) { flags.set(&theirs_.landed); }
  void awaitLanded(FlagBatch& flags) { flags.take(&mine_.landed); }

  // The first lane of a direction.
  Lane& firstLane(bool out) { return lane(out ? out_ : in_, 0); }
  int numSlots() const { return arena_.config().num_slots; }
  // The streams of its lanes.
  void addStreams(std::vector<Stream>& streams) const;
  // Sets every flag of the pair that this rank's streams may wait for, once.
  void release(Stream stream) const;

 private:
  struct Piece {
    size_t offset;
    size_t bytes;
  };
  size_t pieceBytes(size_t bytes) const;
  Piece next(size_t bytes, Progress& progress) const;
  class LaneFlags;
  std::vector<LaneFlags> enter(std::vector<Lane>& lanes, int next_slot, size_t bytes,
                               const Progress& progress, int pieces, Fork& fork,
                               const WaitCheck& check);
  void sendPiece(const std::byte* data, size_t bytes, int slot, LaneFlags& flags);
  void receivePiece(const Incoming& message, const Piece& piece, int slot, LaneFlags& flags);
  Lane& lane(std::vector<Lane>& lanes, int index);
  Stream enterForLanding(bool out, Fork& fork, const WaitCheck& check);

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
  std::array<MarkPtr, 2> last_landing_;  // received, sent
};

}  // namespace hdpcomm::device
