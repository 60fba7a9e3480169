// How the operations of a StreamEngine move: over links between mapped arenas (LinkMover, ranks of
// one host), by NCCL (NcclMover), or each message the way that its peer has (MixedMover). The
// engine does the rest alike for all: calls compared with the peers', deadlines, peers that die,
// errors, works.
//
// All calls come under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collective/plan.hpp"
#include "device/event_pool.hpp"
#include "transport/stats.hpp"

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

    size_t bytes() const { return count * dtypeBytes(dtype); }
  };
  using Messages = std::vector<Message>;

  struct Exchange {
    const Messages& sends;
    const Messages& recvs;
    Stream caller;
    bool background;
    bool captured;  // into a graph
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
  using WaitCheck = DeviceApi::InterruptCheck;

  // The end of what a stream held. No event: the stream holds nothing more yet.
  struct End {
    Stream stream;
    Fence event;
  };

  // An operation that was checked and has the memory that it needs besides its tensors; what it was
  // prepared from must still be there when it is enqueued. Enqueued once, or dropped.
  class PreparedExchange {
   public:
    virtual ~PreparedExchange() = default;
    // `begin` was recorded on the caller's stream just now. The exchange has ended when all that is
    // returned has. In the background it puts no work on the caller's stream.
    virtual std::vector<End> enqueue(Event begin, const WaitCheck& check) && = 0;
  };
  class PreparedCollective {
   public:
    virtual ~PreparedCollective() = default;
    // The collective has ended with what its stream holds now; its event, if there is one already.
    virtual Fence enqueue(const WaitCheck& check) && = 0;
  };

  virtual ~StreamMover() = default;

  virtual const char* name() const = 0;  // of the transport
  // Where messages may land; zones are of one size on all ranks that have one, so both sides of a
  // message can tell a good offset from a bad one.
  struct Zone {
    std::byte* data = nullptr;
    size_t bytes = 0;
  };
  virtual Zone zone() const { return {}; }
  // Whether messages between this rank and the peer may name a landing place; both say the same.
  virtual bool lands(int /*peer*/) const { return false; }
  virtual size_t scratchBytes() const = 0;
  // This rank's device memory that peers map.
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

  // Called before any peer hears of the operation. Throw InvalidUsage for what cannot be done.
  virtual std::unique_ptr<PreparedExchange> prepare(const Exchange& operation) = 0;
  virtual std::unique_ptr<PreparedCollective> prepare(const Collective& operation) = 0;

  // The mover's own streams that operations may use.
  virtual std::vector<Stream> streams() const = 0;

  // Throws the failure that the mover has found since, if it can find any by itself.
  virtual void checkHealth() {}
  // After an error: sets everything that the streams wait for, once, so that they drain; outputs
  // are undefined. Called at least once, and again until they have drained.
  virtual void release(Stream control) = 0;
  // The device has failed, so that its streams run nothing more, before retire().
  virtual void deviceLost() {}
  // The engine has closed, and its streams have drained; peers may still be at work.
  virtual void retire() = 0;

  virtual Stats stats() const = 0;

 protected:
  // Throws InvalidUsage for a landing place outside of the zone, or for a receive whose tensor does
  // not lie there.
  void checkLanding(const Message& message, bool received) const;
};

}  // namespace hdpcomm
