// How bytes move between the ranks of one world. A transport knows peers and messages, nothing of
// collectives.
//
// Messages of an ordered pair of ranks arrive in the order in which they were posted, and carry
// what the sender called; a receive whose call differs fails on both sides. Every operation has a
// number on each ordered pair (the sender's n-th operation towards the receiver is the receiver's
// n-th from the sender): a message with a lower number than the receive's belongs to an operation
// that the receiver gave up, and is dropped. So a pair is usable again after any failure.
//
// No member function blocks but idle(), and cancel() where a receiver is copying from the memory of
// a request: until the copy has ended or its rank has died, 10 s at most. Calls are serialised by
// the owner (comm/world.hpp holds the lock).
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
#include "transport/stats.hpp"

namespace hdpcomm {

using Clock = std::chrono::steady_clock;

// Shared by the requests of one operation; owned by it.
struct Completion {
  uint32_t pending = 0;          // requests posted and not ended
  std::optional<Error> failure;  // the first one
};

struct SendRequest {
  int peer = -1;
  const void* data = nullptr;  // must stay unchanged until the request has ended
  size_t bytes = 0;
  uint32_t number = 0;
  bool confirm = false;  // ends only when the receiver has accepted the message
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

  // data[offset...] = a piece of the message, or operand op piece.
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
  // Moves what can be moved now. Failures go to the requests' completions. False: no request has
  // ended, failed or been posted to its channel.
  virtual bool progress() = 0;

  // For an operation that posts no more receives: if the next message of `peer` belongs to it all
  // the same (its number is at most `number`), rejects it and fails `completion`, since the peer
  // called something else.
  virtual void rejectUnexpected(int peer, uint32_t number, const Call& call,
                                Completion* completion) = 0;

  // Withdraws all requests of an operation. On return no rank reads or writes their buffers any
  // more.
  virtual void cancel(const Completion* completion) = 0;
  // The peers of the operation's requests that have not ended.
  virtual std::vector<int> awaited(const Completion* completion) = 0;
  // Tells `peer` that this rank gave up an operation, and why: its sends up to one number, its
  // receives up to another.
  virtual void notifyFailure(int peer, const Error& error, std::optional<uint32_t> send_number,
                             std::optional<uint32_t> recv_number) = 0;
  // Why an operation with these numbers on its pairs with `peer` cannot end: the peer gave up this
  // very operation, or, where `needed` says that requests to or from it are still to be posted, a
  // later one, or it is dead or closed. Hears failures from peers without requests, too. Not cheap,
  // like checkPeers().
  virtual std::optional<Error> lost(int peer, std::optional<uint32_t> send_number,
                                    std::optional<uint32_t> recv_number, bool needed) = 0;
  // Sets the failure of requests whose peer is dead or closed. Not cheap: called a few times a
  // second while waiting.
  virtual void checkPeers() = 0;
  // PeerLost with what is known, if the peer has left, died or been cut off. Not cheap either.
  virtual std::optional<Error> departure(int peer) = 0;

  // An opaque count that changes whenever idle() would return; read it before progress().
  virtual uint32_t idleTicket() = 0;
  // Sleeps until something may have changed since `ticket` was read, or `until`.
  virtual void idle(uint32_t ticket, Clock::time_point until) = 0;
  // Ends an idle() of this rank, from any thread, also when the transport is gone by then.
  virtual std::function<void()> waker() = 0;
  // True when ranks share cores, so that busy waiting steals time from the peer that is awaited.
  virtual bool oversubscribed() const noexcept = 0;

  // Memory from which messages go faster than from other memory, or null when this transport has
  // none. It outlives the transport.
  virtual std::shared_ptr<std::byte> allocate(size_t bytes) {
    (void)bytes;
    return nullptr;
  }

  virtual Stats stats() const = 0;
  // Says goodbye; peers that still wait for this rank fail. Idempotent.
  virtual void close(const std::string& reason) noexcept = 0;
};

}  // namespace hdpcomm
