// Moves bytes between the ranks of one world. A transport knows peers and messages, but no
// collectives.
//
// Messages of an ordered pair of ranks arrive in the order in which they were posted, and carry
// what the sender called; a receive whose call differs fails on both sides. Every operation has a
// number on each ordered pair (the sender's n-th operation towards the receiver is the receiver's
// n-th from the sender): a message with a lower number than the receive's belongs to an operation
// that the receiver did not receive, and is dropped. After any failure of an operation its pairs
// are out of step: requests on them are refused until postResync() has ended on both sides.
//
// Only idle() blocks, and cancel() while a rank of the own process copies from the memory of a
// request. The owner serialises all calls: they are made under the lock of the World
// (comm/host/world.hpp).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/call.hpp"
#include "base/error.hpp"
#include "transport/counters.hpp"
#include "transport/pulse.hpp"
#include "transport/stats.hpp"
#include "transport/wait_board.hpp"

namespace hdpcomm {

using Clock = std::chrono::steady_clock;

// Shared by the requests of one operation; owned by it.
struct Completion {
  uint32_t pending = 0;          // requests that were posted and have not ended
  std::optional<Error> failure;  // the first one
};

struct SendRequest {
  int peer = -1;
  const void* data = nullptr;  // must stay unchanged until the request has ended
  size_t bytes = 0;
  uint32_t number = 0;
  bool confirm = false;  // end only when the receiver has accepted the message
  Call call;
  Completion* completion = nullptr;
};

struct RecvRequest {
  int peer = -1;
  void* data = nullptr;
  size_t bytes = 0;
  ReduceFn reduce = nullptr;      // null: data = message; else data = operand op message
  const void* operand = nullptr;  // with reduce
  size_t element_bytes = 1;
  uint32_t number = 0;
  Call call;
  Completion* completion = nullptr;

  // Stores a piece of the message at data + offset, reduced with the operand if there is one.
  void store(size_t offset, const std::byte* piece, size_t piece_bytes) const {
    auto* out = static_cast<std::byte*>(data) + offset;
    if (reduce == nullptr) {
      if (piece_bytes > 0) std::memcpy(out, piece, piece_bytes);
    } else {
      reduce(out, static_cast<const std::byte*>(operand) + offset, piece,
             piece_bytes / element_bytes);
    }
  }
};

// A FetchRequest to a rank of another host. Thread-safe, and needs no lock of the World.
class RemoteFetch {
 public:
  virtual ~RemoteFetch() = default;
  // Waits for the answer. None when `until` is over, or when none can come: the owner was lost or
  // has left, or this rank has.
  virtual std::optional<FetchResult> wait(Clock::time_point until) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* name() const noexcept = 0;
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  // The numbers of the next operation that sends to `peer` / receives from it.
  virtual uint32_t nextSendNumber(int peer) = 0;
  virtual uint32_t nextRecvNumber(int peer) = 0;

  virtual void postSend(const SendRequest& request) = 0;
  virtual void postRecv(const RecvRequest& request) = 0;
  // Makes the progress that is possible now. Failures go to the requests' completions. False: no
  // request has ended, failed or been posted to its channel.
  virtual bool progress() = 0;

  // For an operation that posts no more receives: if the next message of `peer` still belongs to it
  // (its number is at most `number`), the peer called something else; rejects the message and fails
  // `completion`.
  virtual void rejectUnexpected(int peer, uint32_t number, const Call& call,
                                Completion* completion) = 0;

  // Withdraws all requests of an operation. On return no rank of this process reads or writes their
  // buffers any more, and what another process still copies from them completes no receive.
  virtual void cancel(const Completion* completion) = 0;
  // The peers of the operation's requests that have not ended.
  virtual std::vector<int> awaited(const Completion* completion) = 0;
  // This rank gave up an operation: its sends to `peer` from `first_send` up to one number, its
  // receives up to another. Notifies the peer of the reason, and puts the pair out of step.
  virtual void notifyFailure(int peer, const Error& error, std::optional<uint32_t> first_send,
                             std::optional<uint32_t> send_number,
                             std::optional<uint32_t> recv_number) = 0;
  // The error of refused operations with `peer`; none while the pair is in step.
  virtual std::optional<Error> outOfStep(int peer) = 0;
  // Numbers of operations with `peer` start again for those submitted from now on, which must not
  // be posted before a postResync() has ended.
  virtual void restartNumbers(int peer) = 0;
  // A request that ends when the peer has posted its own: then the pair is in step, and nothing
  // that was sent before is received any more.
  virtual void postResync(int peer, Completion* completion) = 0;
  // Why an operation with these numbers on its pairs with `peer` cannot end: the peer gave up this
  // very operation; or, if requests to or from the peer are still `needed`, it gave up a later one,
  // is dead, or is closed. Also receives notices of peers without requests. As expensive as
  // checkPeers().
  virtual std::optional<Error> lost(int peer, std::optional<uint32_t> send_number,
                                    std::optional<uint32_t> recv_number, bool needed) = 0;
  // Fails the requests whose peer is dead or closed. Too expensive for every poll: called a few
  // times a second while waiting.
  virtual void checkPeers() = 0;
  // PeerLost with what is known, if the peer has left, died or been cut off. As expensive as
  // checkPeers().
  virtual std::optional<Error> departure(int peer) = 0;

  // An opaque count that changes whenever idle() would return; read it before progress().
  virtual uint32_t idleTicket() = 0;
  // Sleeps until something may have changed since `ticket` was read, or `until`.
  virtual void idle(uint32_t ticket, Clock::time_point until) = 0;
  // A function that ends an idle() of this rank. May be called from any thread, even when the
  // transport no longer exists.
  virtual std::function<void()> waker() = 0;
  // True if ranks share cores, so that busy waiting takes time from the peer that is awaited.
  virtual bool oversubscribed() const noexcept = 0;

  // Memory from which this transport sends faster than from other memory, or null if it has none.
  // The memory may outlive the transport.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  // Where the rank writes what it waits for; null for ranks of other hosts.
  virtual WaitPlace* waitPlace(int rank) {
    (void)rank;
    return nullptr;
  }

  // The counters of a rank; null for ranks of other hosts. The memory may outlive the transport.
  // This and startFetch() may be called from any thread without the World's lock.
  virtual std::shared_ptr<CounterWords> counterWords(int rank) = 0;
  // Asks a rank of another host to add to a counter of its own; its carrier's thread does so,
  // whatever the rank does. If it is dropped before it was sent, it is not sent.
  virtual std::unique_ptr<RemoteFetch> startFetch(int rank, const FetchRequest& request) {
    (void)rank;
    (void)request;
    return nullptr;  // no rank is of another host
  }

  // Changes whenever a message of this rank has moved on, even if only by a piece.
  virtual uint64_t moves() const = 0;
  // Tells the others when this rank last moved.
  virtual void publishPulse(const Pulse& pulse) = 0;
  // What the peer last told; none if it tells nothing.
  virtual std::optional<Pulse> pulse(int peer) = 0;

  virtual Stats stats() const = 0;
  // Leaves the world for the given reason; peers that still wait for this rank fail. Idempotent.
  virtual void close(const std::string& reason) noexcept = 0;
};

}  // namespace hdpcomm
