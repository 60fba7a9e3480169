// How the operations of a StreamEngine move: over links between mapped arenas (LinkMover, ranks of
// one host), by NCCL (NcclMover), or each message the way that its peer has (MixedMover). The
// engine does the rest alike for all: calls compared with the peers', deadlines, peers that die,
// errors, works.
//
// All calls come under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.hpp"
#include "collective/plan.hpp"
#include "device/handles.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

class StreamMover {
 public:
  static constexpr uint64_t kNoLanding = ~0ULL;
  struct Message {
    int peer = -1;  // global rank
    std::byte* data = nullptr;
    size_t count = 0;
    DType dtype = DType::kUint8;
    // Offset in the receiver's landing zone (`data` of the receiver).
    uint64_t landing = kNoLanding;
  };
  using Messages = std::vector<Message>;

  struct Exchange {
    const Messages& sends;
    const Messages& recvs;
    Event begin;  // recorded on `caller` just now
    Stream caller;
    bool background;
  };
  struct Collective {
    const CollectivePlan& plan;
    const std::vector<int>& ranks;  // global
    std::byte* in;
    std::byte* out;
    Stream stream;  // everything in order with it
    bool captured;  // into a graph
  };
  // Called while a call of the mover waits on the host; throws to give up.
  using Look = std::function<void()>;

  virtual ~StreamMover() = default;

  virtual const char* name() const = 0;  // of the transport
  // Where messages may land; zones are of one size on all ranks that have one, so both sides of a
  // message can tell a good offset from a bad one.
  struct Zone {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };
  // This rank's zone for messages of that rank (global); -1: for those over links, or the only one.
  virtual Zone zoneFor(int /*source*/) const { return {}; }
  // Throws InvalidUsage for a landing place outside of the zone, or for a receive that is not
  // there.
  void checkLanding(const Message& message, bool received) const;
  // Whether messages between this rank and the peer may name a landing place; both say the same.
  virtual bool lands(int /*peer*/) const { return false; }
  virtual size_t scratchBytes() const = 0;
  // Of this rank's device memory that peers map.
  virtual size_t arenaBytes() const { return 0; }

  // How collectives of these ranks (global) are planned; the same on all of them.
  virtual PlanningRules planning(const std::vector<int>& ranks) const = 0;
  // What a collective moves between this rank and each member; as members post it on the board,
  // they must agree on it.
  struct Traffic {
    std::vector<uint64_t> sent;  // by group rank
    std::vector<uint64_t> received;
    uint64_t landing = kNoLanding;  // where in their landing zones the operands lie
  };
  virtual Traffic trafficOf(const Collective& operation) const;

  // Whether what it moves to and from the peer must be captured into graphs on both sides or on
  // none.
  virtual bool capturesAlike(int /*peer*/) const { return false; }

  // Whether messages with landing places that this rank and the peer exchange at once on one side
  // must be exchanged at once on the other.
  virtual bool landsTogether(int /*peer*/) const { return false; }

  // Before anybody is told of the operation: throws InvalidUsage for what cannot be done, and takes
  // the memory that it needs besides its tensors.
  virtual void prepare(const Messages& sends, const Messages& recvs, bool captured) = 0;
  virtual void prepare(const Collective& operation) = 0;
  // Enqueue the operation that was prepared last. An exchange has ended when what the streams
  // returned hold now has; a collective, when its stream has. In the background nothing of an
  // exchange is work of the caller's stream.
  virtual std::vector<Stream> exchange(const Exchange& operation, const Look& look) = 0;
  virtual void collective(const Collective& operation, const Look& look) = 0;

  // The streams of its own that operations may stand on.
  virtual std::vector<Stream> streams() const = 0;

  // Throws what has gone wrong since, if the mover has means of its own to know.
  virtual void checkHealth() {}
  // After an error: gives the streams what they wait for, once; it writes rubbish. Called at least
  // once, and again until they have run dry.
  virtual void release(Stream control) = 0;
  // The engine has closed, and its streams have run dry; peers may still be at work.
  virtual void retire() = 0;

  virtual TransportStats stats() const = 0;
  // Of NCCL, where it has a part: the groups and one-sided messages so far, and the device memory
  // that it is predicted to hold for this rank's peers.
  struct NcclUse {
    uint64_t groups = 0;
    uint64_t puts = 0;
    uint64_t whole_world_ops = 0;
    uint64_t buffer_bytes = 0;
  };
  virtual NcclUse ncclUse() const { return {}; }
};

}  // namespace hdpcomm
