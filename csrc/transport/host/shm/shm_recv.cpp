// The receiving half: matching, the copy or reduction directly from where the bytes are, failure
// notices and markers of resync().
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/host/shm/shm_transport.hpp"

namespace hdpcomm::shm {
namespace {

inline constexpr size_t kScratchBytes =
    128 * 1024;  // fits the second-level cache beside the operands

// Returns false when the memory cannot be read (errno is set).
bool readProcess(int pid, std::byte* out, uint64_t address, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    iovec local{out + done, bytes - done};
    iovec remote{reinterpret_cast<void*>(address + done), bytes - done};
    const ssize_t got = ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<size_t>(got);
  }
  return true;
}

}  // namespace

void ShmTransport::postRecv(const RecvRequest& request) {
  Peer& peer = peers_[request.peer];
  if (peer.failures.refuses(request)) return;
  ++request.completion->pending;
  peer.recvs.push(request);
  activate(peer);
}

void ShmTransport::consume(Peer& peer, const Slot& slot) {
  const Kind kind = readOnce(slot.kind);
  if (kind == Kind::kEager || kind == Kind::kFragment || kind == Kind::kFailure) {
    peer.payload_received = slot.at.address + (slot.at.fragment + 63) / 64 * 64;
    peer.in->payload_consumed.store(peer.payload_received, std::memory_order_release);
  }
  ++peer.received;
  peer.used = true;
  // Release: the reads of slot and payload and the store to `state` happen before it.
  peer.in->consumed.store(peer.received, std::memory_order_release);
  ringDoorbell(*peer.control);
}

// The message with this index, or null if it was not published yet.
Slot* ShmTransport::published(const Peer& peer, uint64_t index) const {
  Slot& slot = peer.in->slots[index % kSlots];
  return slot.stamp.load(std::memory_order_acquire) == index + 1 ? &slot : nullptr;
}

// Consumes messages while there are receives for them, and the notices and markers among them.
bool ShmTransport::drain(Peer& peer) {
  const uint64_t before = peer.received;
  while (Slot* slot = published(peer, peer.received)) {
    if (readOnce(slot->kind) >= Kind::kFailure) {
      receiveControl(peer, *slot);
    } else if (peer.recvs.empty()) {
      const bool revoked = slot->state.load(std::memory_order_relaxed) == SlotState::kRevoked;
      if (!revoked && !peer.failures.outOfStep()) break;
      drop(peer, *slot);
    } else if (!deliver(peer, *slot)) {
      break;
    }
  }
  return peer.received != before;
}

// Takes a failure notice, or a marker of resync().
void ShmTransport::receiveControl(Peer& peer, const Slot& slot) {
  const Kind kind = readOnce(slot.kind);
  if (kind == Kind::kFailure) {
    const std::optional<Notice> notice = noticeIn(peer, slot);
    if (!notice) {
      cutOff(peer, "length, place or cause of the failure notice", slot.at.fragment);
      return;
    }
    consume(peer, slot);
    completeAccepted(peer);
    peer.failures.receive(*notice, peer.recvs, peer.inflight, peer.queue);
  } else if (kind == Kind::kMarker) {
    const Marker marker{readOnce(slot.number), static_cast<uint32_t>(readOnce(slot.bytes))};
    consume(peer, slot);
    std::optional<Marker> answer;
    const bool expected = peer.resync.underWay();
    const bool in_step = peer.resync.receive(marker, &answer);
    if (answer) sendMarker(peer, *answer);
    if (in_step) {
      peer.failures.resynced();
    } else if (!expected) {
      completeAccepted(peer);
      peer.failures.peerRestarted(peer.recvs, peer.inflight, peer.queue);
    }
  } else {
    cutOff(peer, "kind", static_cast<uint64_t>(kind));
  }
}

bool ShmTransport::deliver(Peer& peer, Slot& slot) {
  RecvRequest& request = peer.recvs.front();
  // The signed difference is right when the numbers wrap.
  const auto ahead = static_cast<int32_t>(slot.number - request.number);
  if (ahead < 0) {
    drop(peer, slot);
    return true;
  }
  if (request.completion->failure) return false;  // its owner is about to cancel it
  const bool revoked = slot.state.load(std::memory_order_relaxed) == SlotState::kRevoked;
  if (ahead > 0 || slot.call != request.call || slot.bytes != request.bytes || revoked) {
    if (revoked) return takeRevoked(peer, slot, request);
    reject(peer, slot, request);
    return true;
  }
  // From here on the size is the request's: the peer can change the slot's.
  const size_t bytes = request.bytes;
  switch (const Kind kind = readOnce(slot.kind)) {
    case Kind::kInline:
      if (bytes > kInlineBytes) {
        cutOff(peer, "size (without payload)", bytes);
        return false;
      }
      if (request.reduce == nullptr) {
        copyInline(request.data, slot.inline_data, bytes);
      } else {
        request.store(0, slot.inline_data, bytes);
      }
      break;
    case Kind::kEager: {
      const std::byte* piece = payloadOf(peer, slot, bytes);
      if (piece == nullptr) return false;
      request.store(0, piece, bytes);
      break;
    }
    case Kind::kFragment: {
      const size_t piece_bytes = std::min(kFragmentBytes, bytes - peer.fragment_offset);
      if (const uint64_t told = readOnce(slot.at.fragment); told != piece_bytes) {
        cutOff(peer, "fragment size", told);
        return false;
      }
      const std::byte* piece = payloadOf(peer, slot, piece_bytes);
      if (piece == nullptr) return false;
      request.store(peer.fragment_offset, piece, piece_bytes);
      peer.fragment_offset += piece_bytes;
      if (peer.fragment_offset < bytes) {
        consume(peer, slot);
        return true;
      }
      break;
    }
    case Kind::kDirect:
    case Kind::kShared: {
      SlotState posted = SlotState::kPosted;
      if (!slot.state.compare_exchange_strong(posted, SlotState::kClaimed,
                                              std::memory_order_acq_rel)) {
        return takeRevoked(peer, slot, request);
      }
      const bool copied = copyDirect(peer, slot, request);
      if (!peer.broken.empty()) return false;
      SlotState claimed = SlotState::kClaimed;
      // Release: the copy has ended before the sender can see it taken.
      if (!slot.state.compare_exchange_strong(claimed,
                                              copied ? SlotState::kTaken : SlotState::kUnreadable,
                                              std::memory_order_acq_rel)) {
        request.completion->failure.reset();  // that the copy failed does not matter any more
        return takeRevoked(peer, slot, request);
      }
      if (!copied) {
        consume(peer, slot);
        return true;
      }
      break;
    }
    default:  // a notice or marker is handled by drain(), so the peer has just written it
      cutOff(peer, "kind", static_cast<uint64_t>(kind));
      return false;
  }
  ++stats_.messages_received;
  stats_.bytes_received += bytes;
  consume(peer, slot);
  --request.completion->pending;
  peer.fragment_offset = 0;
  peer.recvs.pop();
  return true;
}

const std::byte* ShmTransport::payloadOf(Peer& peer, const Slot& slot, size_t bytes) {
  const uint64_t capacity = segment_->layout().payload_bytes;
  const uint64_t address = readOnce(slot.at.address);
  const uint64_t place = address % capacity;
  // A reduction reads whole elements there.
  if (bytes <= capacity && place <= capacity - bytes && place % kPayloadAlignment == 0) {
    return peer.in_payload + place;
  }
  cutOff(peer, "place in the payload ring", address);
  return nullptr;
}

// The address in this process of a message in the sender's heap; null if the heap cannot be mapped.
const std::byte* ShmTransport::sharedBytes(Peer& peer, uint64_t address, size_t bytes) {
  if (!peer.heap.mapped()) {
    const int descriptor = peer.control->heap_descriptor.load(std::memory_order_acquire);
    try {
      peer.heap = PeerHeap(peer.control->pid, descriptor);
    } catch (const Error&) {
      return nullptr;  // the caller tries process_vm_readv, which reports the reason if it fails
    }
  }
  const uint64_t offset = address - readOnce(peer.control->heap_base);
  if (offset <= kHeapBytes && bytes <= kHeapBytes - offset) return peer.heap.base() + offset;
  cutOff(peer, "address in the shared heap", address);
  return nullptr;
}

// One copy from the sender's memory; a reduction from another process runs in pieces that fit the
// cache.
bool ShmTransport::copyDirect(Peer& peer, const Slot& slot, const RecvRequest& request) {
  const uint64_t address = readOnce(slot.at.address);
  const size_t size = request.bytes;
  if (peer.same_process) {
    request.store(0, reinterpret_cast<const std::byte*>(address), size);
    return true;
  }
  if (readOnce(slot.kind) == Kind::kShared) {
    const std::byte* bytes = sharedBytes(peer, address, size);
    if (!peer.broken.empty()) return false;
    const bool aligned = reinterpret_cast<uintptr_t>(bytes) % request.element_bytes == 0;
    if (bytes != nullptr && (request.reduce == nullptr || aligned)) {
      request.store(0, bytes, size);
      return true;
    }
  }
  const int pid = peer.control->pid;
  bool ok = true;
  if (request.reduce == nullptr) {
    ok = readProcess(pid, static_cast<std::byte*>(request.data), address, size);
  } else {
    if (scratch_.empty()) scratch_.resize(kScratchBytes);
    for (size_t done = 0; ok && done < size; done += kScratchBytes) {
      const size_t bytes = std::min(kScratchBytes, size - done);
      ok = readProcess(pid, scratch_.data(), address + done, bytes);
      if (ok) request.store(done, scratch_.data(), bytes);
    }
  }
  if (ok) return true;
  const int error = errno;
  const bool gone = error == ESRCH || !processAlive(*peer.control);
  request.completion->failure = Error(
      gone ? ErrorKind::kPeerLost : ErrorKind::kInternal,
      gone ? "rank " + std::to_string(peer.rank) + " died while rank " + std::to_string(rank_) +
                 " copied from its memory"
           : "process_vm_readv from rank " + std::to_string(peer.rank) + " failed with " +
                 std::strerror(error) +
                 ": the sender's buffer was freed or protected while it was sent",
      {.rank = rank_, .peer = peer.rank, .op = opName(request.call.op), .ranks = {}, .seq = -1});
  return false;
}

// Writes the receiver's call into the slot, so that the sender's error can name both.
void ShmTransport::reject(Peer& peer, Slot& slot, const RecvRequest& request) {
  request.completion->failure =
      mismatchError({rank_, request.call, request.bytes},
                    {peer.rank, slot.call, static_cast<size_t>(slot.bytes)}, false);
  SlotState posted = SlotState::kPosted;
  if (slot.state.load(std::memory_order_acquire) == SlotState::kPosted) {
    slot.call = request.call;
    slot.bytes = request.bytes;
    slot.state.compare_exchange_strong(posted, SlotState::kRejected, std::memory_order_acq_rel);
  }
  consume(peer, slot);
}

// Discards a message that arrived while the pair was out of step, or that no operation received.
void ShmTransport::drop(Peer& peer, Slot& slot) {
  SlotState posted = SlotState::kPosted;
  slot.state.compare_exchange_strong(posted, SlotState::kDropped, std::memory_order_acq_rel);
  consume(peer, slot);
}

void ShmTransport::rejectUnexpected(int peer_rank, uint32_t number, const Call& call,
                                    Completion* completion) {
  Peer& peer = peers_[peer_rank];
  if (!peer.recvs.empty() || completion->failure || peer.failures.outOfStep()) return;
  Slot* head = published(peer, peer.received);
  if (head == nullptr || readOnce(head->kind) >= Kind::kFailure || !upTo(head->number, number) ||
      head->state.load(std::memory_order_relaxed) == SlotState::kRevoked) {
    return;
  }
  RecvRequest request;
  request.call = call;
  request.completion = completion;
  reject(peer, *head, request);
}

std::optional<Notice> ShmTransport::noticeIn(const Peer& peer, const Slot& slot) const {
  const uint64_t capacity = segment_->layout().payload_bytes;
  const uint64_t place = readOnce(slot.at.address) % capacity;
  const uint64_t length = readOnce(slot.at.fragment);
  const uint8_t kind = readOnce(slot.detail);
  const int16_t cause = readOnce(slot.call.root);
  if (length > kFailureText || place > capacity - length || !noticeFits(kind, cause, size())) {
    return std::nullopt;
  }
  const std::string text =
      length > 0 ? plainText({reinterpret_cast<const char*>(peer.in_payload + place), length})
                 : "rank " + std::to_string(peer.rank) + " gave up an operation";
  const GiveUp ours = endsHere(static_cast<uint32_t>(slot.call.count), slot.number,
                               static_cast<uint32_t>(slot.bytes));
  return noticeFrom(peer.rank, rank_, static_cast<ErrorKind>(kind), text, cause, ours);
}

// The sender withdrew the message that this request waits for. The sender's notice says why; it may
// be behind messages of later operations, which must not be received by this request.
bool ShmTransport::takeRevoked(Peer& peer, const Slot& slot, const RecvRequest& request) {
  const auto notice = noticeAhead(peer, [](const Notice&) { return true; });
  const bool full = published(peer, peer.received + kSlots - 1) != nullptr;
  if (!notice && !full) return false;  // the notice has not arrived yet
  request.completion->failure =
      notice ? notice->error
             : Error(ErrorKind::kAborted,
                     "rank " + std::to_string(peer.rank) + " gave up " + describe(slot.call) +
                         " before rank " + std::to_string(rank_) + " had taken its message",
                     {.rank = rank_, .peer = peer.rank, .op = {}, .ranks = {}, .seq = -1});
  consume(peer, slot);
  return true;
}

}  // namespace hdpcomm::shm
