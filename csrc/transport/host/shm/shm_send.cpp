// The sending half: inline, eager, direct and fragmented messages, and their completion.
#include <algorithm>
#include <cstring>
#include <thread>

#include "transport/host/shm/shm_transport.hpp"

namespace hdpcomm::shm {

void ShmTransport::postSend(const SendRequest& request) {
  Peer& peer = peers_[request.peer];
  if (peer.failures.refuses(request)) return;
  ++request.completion->pending;
  if (peer.queue.empty() && !needsFragments(peer, request) && pushMessage(peer, request)) return;
  PendingSend send;
  send.request = request;
  if (!peer.queue.empty() || !tryPush(peer, send)) {
    peer.queue.push(std::move(send));
    activate(peer);
  }
}

Slot* ShmTransport::claimSlot(Peer& peer) {
  if (peer.sent - peer.consumed_seen >= kSlots) {
    // Refreshes consumed_seen, and reads the states of slots before they are reused.
    completeInflight(peer);
    if (peer.sent - peer.consumed_seen >= kSlots) return nullptr;
  }
  return &peer.out->slots[peer.sent % kSlots];
}

// Contiguous space in the payload ring that leaves `rest` bytes, or null. A piece that would wrap
// starts at the beginning of the ring instead.
std::byte* ShmTransport::claimPayload(Peer& peer, size_t bytes, size_t rest, uint64_t* offset) {
  const uint64_t capacity = segment_->layout().payload_bytes;
  const uint64_t rounded = (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
  uint64_t start = peer.payload_sent;
  if (start % capacity + rounded > capacity) start += capacity - start % capacity;
  if (start + rounded + rest - peer.payload_taken_seen > capacity) {
    const uint64_t taken = peer.out->payload_consumed.load(std::memory_order_acquire);
    if (taken > peer.payload_sent) {
      cutOff(peer, "count of consumed payload", taken);
      return nullptr;
    }
    peer.payload_taken_seen = taken;
    if (start + rounded + rest - peer.payload_taken_seen > capacity) return nullptr;
  }
  *offset = start;
  peer.payload_sent = start + rounded;
  return peer.out_payload + start % capacity;
}

void ShmTransport::publish(Peer& peer, Slot& slot) {
  slot.state.store(SlotState::kPosted, std::memory_order_relaxed);
  slot.stamp.store(peer.sent + 1, std::memory_order_release);
  ++peer.sent;
  peer.used = true;
  ringDoorbell(*peer.control);
}

bool ShmTransport::inSharedHeap(const Peer& peer, const SendRequest& request) const {
  return heap_ && !peer.same_process && heap_->contains(request.data, request.bytes);
}

bool ShmTransport::needsFragments(const Peer& peer, const SendRequest& request) const {
  return request.bytes > eager_bytes_ && !inSharedHeap(peer, request) &&
         peer.out->direct_allowed.load(std::memory_order_relaxed) == 0;
}

// True when the whole message is on the channel.
bool ShmTransport::tryPush(Peer& peer, PendingSend& send) {
  if (send.kind == Kind::kFailure) return pushFailure(peer, send.notice);
  if (send.kind == Kind::kMarker) return pushMarker(peer, send.marker);
  if (send.kind != Kind::kFragment && !needsFragments(peer, send.request)) {
    return pushMessage(peer, send.request);
  }
  send.kind = Kind::kFragment;
  return pushFragments(peer, send);
}

bool ShmTransport::pushMessage(Peer& peer, const SendRequest& request) {
  const bool direct = request.bytes > eager_bytes_;
  Slot* slot = claimSlot(peer);
  if (slot == nullptr) return false;
  if (direct) {
    slot->kind = inSharedHeap(peer, request) ? Kind::kShared : Kind::kDirect;
    slot->at.address = reinterpret_cast<uint64_t>(request.data);
  } else if (request.bytes <= kInlineBytes) {
    slot->kind = Kind::kInline;
    copyInline(slot->inline_data, request.data, request.bytes);
  } else {
    uint64_t offset = 0;
    std::byte* payload = claimPayload(peer, request.bytes, kNoticeBytes, &offset);
    if (payload == nullptr) return false;
    std::memcpy(payload, request.data, request.bytes);
    slot->kind = Kind::kEager;
    slot->at.address = offset;
    slot->at.fragment = request.bytes;
  }
  slot->call = request.call;
  slot->bytes = request.bytes;
  slot->number = request.number;
  publish(peer, *slot);
  ++stats_.messages_sent;
  stats_.bytes_sent += request.bytes;
  if (direct || request.confirm) {
    peer.inflight.push({peer.sent - 1, request});
    activate(peer);
  } else {
    --request.completion->pending;
  }
  return true;
}

bool ShmTransport::pushFragments(Peer& peer, PendingSend& send) {
  const SendRequest& request = send.request;
  while (send.offset < request.bytes) {
    const size_t bytes = std::min(kFragmentBytes, request.bytes - send.offset);
    Slot* slot = claimSlot(peer);
    if (slot == nullptr) return false;
    uint64_t offset = 0;
    std::byte* payload = claimPayload(peer, bytes, kNoticeBytes, &offset);
    if (payload == nullptr) return false;
    std::memcpy(payload, static_cast<const std::byte*>(request.data) + send.offset, bytes);
    slot->kind = Kind::kFragment;
    slot->at.address = offset;
    slot->at.fragment = bytes;
    slot->call = request.call;
    slot->bytes = request.bytes;
    slot->number = request.number;
    publish(peer, *slot);
    send.offset += bytes;
  }
  ++stats_.messages_sent;
  stats_.bytes_sent += request.bytes;
  peer.inflight.push({peer.sent - 1, request});
  activate(peer);
  return true;
}

bool ShmTransport::pushMarker(Peer& peer, const Marker& marker) {
  Slot* slot = claimSlot(peer);
  if (slot == nullptr) return false;
  slot->kind = Kind::kMarker;
  slot->call = Call{};
  slot->number = marker.attempt;
  slot->bytes = marker.peer_attempt;
  publish(peer, *slot);
  return true;
}

bool ShmTransport::pushFailure(Peer& peer, const OwnNotice& notice) {
  Slot* slot = claimSlot(peer);
  if (slot == nullptr) return false;
  const std::string text = plainText(notice.text, kFailureText);
  size_t bytes = text.size();
  uint64_t offset = 0;
  std::byte* payload = claimPayload(peer, bytes, 0, &offset);
  if (payload == nullptr) {  // without its text: this rank may not come back to send it later
    bytes = 0;
    payload = claimPayload(peer, bytes, 0, &offset);
    if (payload == nullptr) return false;
  }
  std::memcpy(payload, text.data(), bytes);
  slot->kind = Kind::kFailure;
  slot->detail = static_cast<uint8_t>(notice.kind);
  slot->bytes = notice.ends.recvs.value_or(0);
  slot->number = notice.ends.sends.value_or(0);
  slot->call = Call{};
  slot->call.root = notice.cause;
  slot->call.count = notice.flags();
  slot->at.address = offset;
  slot->at.fragment = bytes;
  publish(peer, *slot);
  return true;
}

// Ends the requests whose messages the receiver has consumed, and fails those that it rejected.
void ShmTransport::completeInflight(Peer& peer) {
  // Acquire: sees the state that the receiver stored before it counted the message as consumed.
  const uint64_t consumed = peer.out->consumed.load(std::memory_order_acquire);
  if (consumed > peer.sent && peer.broken.empty()) {
    cutOff(peer, "count of consumed messages", consumed);
    return;
  }
  peer.consumed_seen = consumed;
  bool drained = false;
  while (!peer.inflight.empty() && peer.inflight.front().index < peer.consumed_seen) {
    const Slot& slot = peer.out->slots[peer.inflight.front().index % kSlots];
    const SlotState state = slot.state.load(std::memory_order_relaxed);
    if (!drained && (state == SlotState::kRejected || state == SlotState::kDropped)) {
      // A receiver that is out of step sent a notice before it refused the message: receives the
      // notice first, which fails the request with the true reason, and may end others.
      drained = true;
      drain(peer);
      continue;
    }
    const Inflight inflight = peer.inflight.front();
    peer.inflight.pop();
    Completion& completion = *inflight.request.completion;
    --completion.pending;
    if (completion.failure) continue;
    if (state == SlotState::kRejected) {
      completion.failure =
          mismatchError({rank_, inflight.request.call, inflight.request.bytes},
                        {peer.rank, slot.call, static_cast<size_t>(slot.bytes)}, true);
    } else if (state == SlotState::kDropped) {
      completion.failure = droppedError(rank_, peer.rank, inflight.request.call);
    } else if (state == SlotState::kUnreadable) {
      completion.failure =
          Error(ErrorKind::kInternal,
                "rank " + std::to_string(peer.rank) + " could not read the buffer that rank " +
                    std::to_string(rank_) + " sent in " + describe(inflight.request.call) +
                    ": it was freed or protected while it was sent",
                {.rank = rank_, .peer = peer.rank, .op = {}, .ranks = {}, .seq = -1});
    }
  }
}

// Ends the requests whose messages the receiver has accepted, up to the first that it did not: a
// failure after that does not concern them.
void ShmTransport::completeAccepted(Peer& peer) {
  const uint64_t consumed = peer.out->consumed.load(std::memory_order_acquire);
  if (consumed > peer.sent) return;  // nonsense: completeInflight() cuts the peer off
  while (!peer.inflight.empty() && peer.inflight.front().index < consumed) {
    const Slot& slot = peer.out->slots[peer.inflight.front().index % kSlots];
    const SlotState state = slot.state.load(std::memory_order_relaxed);
    if (state != SlotState::kPosted && state != SlotState::kTaken) return;
    --peer.inflight.front().request.completion->pending;
    peer.inflight.pop();
  }
}

// Withdraws the messages on the channel whose numbers are `first_send` or later, small ones too: a
// receiver that is late must not take them for those of another operation.
void ShmTransport::revoke(Peer& peer, uint32_t first_send) {
  uint64_t i = peer.out->consumed.load(std::memory_order_acquire);
  if (i > peer.sent) return;  // nonsense: completeInflight() cuts the peer off
  for (; i < peer.sent; ++i) {
    Slot& slot = peer.out->slots[i % kSlots];
    if (slot.kind >= Kind::kFailure || static_cast<int32_t>(slot.number - first_send) < 0) continue;
    SlotState expected = SlotState::kPosted;
    slot.state.compare_exchange_strong(expected, SlotState::kRevoked, std::memory_order_acq_rel);
  }
}

// After it, nothing that the receiver reads in the sender's memory counts as the message. A
// receiver that has begun to copy may be stopped: it finds out when it has finished.
void ShmTransport::withdraw(Peer& peer, const Inflight& inflight) {
  Slot& slot = peer.out->slots[inflight.index % kSlots];
  if (slot.kind != Kind::kDirect && slot.kind != Kind::kShared) return;
  SlotState held = slot.state.load(std::memory_order_acquire);
  while (held == SlotState::kPosted || held == SlotState::kClaimed) {
    if (held == SlotState::kClaimed && peer.same_process) {
      // A thread of this process copies: the memory must last until it has finished, which it does,
      // since it cannot be stopped alone.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      held = slot.state.load(std::memory_order_acquire);
    } else if (slot.state.compare_exchange_weak(held, SlotState::kRevoked,
                                                std::memory_order_acq_rel)) {
      return;
    }
  }
}

}  // namespace hdpcomm::shm
