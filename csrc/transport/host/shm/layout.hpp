// The shared segment: a header, a control block per rank, and a channel for every ordered pair of
// ranks.
//
// The segment is an anonymous file (memfd): it has no name in any file system, so nothing is left
// behind however the ranks end. Pages are touched only when a pair exchanges messages (small worlds
// touch the first ones of each channel at the start), so the unused part of the n^2 channels costs
// address space, not memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/call.hpp"
#include "transport/counters.hpp"
#include "transport/pulse.hpp"
#include "transport/wait_board.hpp"

namespace hdpcomm::shm {

inline constexpr uint64_t kMagic = 0x6864'7063'6f6d'6d34;
inline constexpr size_t kSlots = 64;  // descriptors in flight on a channel; a power of two
inline constexpr size_t kInlineBytes = 16;
inline constexpr size_t kFragmentBytes = 32 * 1024;  // of a fragmented message
inline constexpr size_t kFailureText = 768;
inline constexpr size_t kPayloadAlignment = 64;  // of a message in the payload ring
// What messages leave of the payload ring, for the text of a notice wherever the ring wraps.
inline constexpr size_t kNoticeBytes = 2 * kFailureText;
inline constexpr size_t kMinPayloadBytes = 65536;

enum class Kind : uint8_t {
  kInline,    // payload in the descriptor
  kEager,     // payload in the channel's payload ring
  kDirect,    // payload in the sender's memory; the receiver copies it from there
  kShared,    // the same, in the sender's heap, which the receiver may map
  kFragment,  // payload in the payload ring, in several fragments
  // The sender gave up an operation: its sends up to `number`, its receives up to `bytes`, as the
  // flags in call.count say (failures.hpp). `detail` is the ErrorKind, call.root the rank that it
  // concerns, and the payload ring holds the text.
  kFailure,
  // A marker of resync(): `number` is the sender's attempt, `bytes` the receiver's last one.
  kMarker,
};

enum class SlotState : uint16_t {
  kPosted,
  kClaimed,     // the receiver copies from the sender's memory
  kTaken,       // it has copied all of it, before the sender withdrew the message
  kRejected,    // the receiver refused it; `call` and `bytes` are now the receiver's
  kUnreadable,  // the receiver could not read the sender's memory
  kRevoked,     // the sender withdrew it before it was taken; what was copied of it is void
  kDropped,     // the receiver is out of step, or no operation of it received the message
};

// The descriptor of a message, one cache line. The sender writes it and publishes it by `stamp`;
// the receiver sets `state` (the sender, for kRevoked).
struct Slot {
  // index + 1 of the message in this slot. Release by the sender after the other fields; the
  // receiver's acquire load that sees it also sees them and the payload. Indices never repeat, so a
  // slot needs no clearing.
  std::atomic<uint64_t> stamp;
  Call call;
  uint64_t bytes;
  union {
    std::byte inline_data[kInlineBytes];
    struct {
      uint64_t address;   // kDirect, kShared: in the sender's process; else in the payload ring
      uint64_t fragment;  // bytes of this fragment; kFailure: of the text
    } at;
  };
  uint32_t number;
  std::atomic<SlotState> state;
  Kind kind;
  uint8_t detail;  // kFailure: ErrorKind
};
static_assert(sizeof(Slot) == 64);

// One read of what a peer may change at any time: what was checked is what is used.
template <typename T>
T readOnce(const T& field) {
  return *const_cast<const volatile T*>(&field);
}

// Copies up to kInlineBytes without a function call, as two words that may overlap.
inline void copyInline(void* to, const void* from, size_t bytes) {
  const auto both = [&](auto word) {
    auto last = word;
    std::memcpy(&word, from, sizeof word);
    std::memcpy(&last, static_cast<const std::byte*>(from) + bytes - sizeof last, sizeof last);
    std::memcpy(to, &word, sizeof word);
    std::memcpy(static_cast<std::byte*>(to) + bytes - sizeof last, &last, sizeof last);
  };
  if (bytes >= 8) {
    both(uint64_t{});
  } else if (bytes >= 4) {
    both(uint32_t{});
  } else {
    for (size_t i = 0; i < bytes; ++i) {
      static_cast<std::byte*>(to)[i] = static_cast<const std::byte*>(from)[i];
    }
  }
}
static_assert(kInlineBytes <= 16);

struct alignas(64) Channel {
  // Written by the receiver. `consumed`: number of messages consumed (release: after reading slot
  // and payload and setting `state`).
  std::atomic<uint64_t> consumed;
  std::atomic<uint64_t> payload_consumed;
  std::atomic<uint32_t> direct_allowed;  // 1: the receiver can read the sender's memory
  alignas(64) Slot slots[kSlots];
  // payload_bytes follow
};
static_assert(sizeof(Channel) % 64 == 0);

enum class RankState : uint32_t {
  kAbsent,
  kReady,
  kClosed,
  kLate,  // closed because others did not join in time
};

struct alignas(64) Control {
  // Futex word on which the rank sleeps; changes when there may be something for it to do.
  std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleepers;
  // 1: before this rank sleeps, it makes the other processes' cores execute a memory barrier, so
  // that they need none when they publish. Written before `state`.
  std::atomic<uint32_t> barrier_by_sleeper;
  alignas(64) std::atomic<RankState> state;
  int32_t pid;
  uint64_t start_time;  // of the process, to recognise a reused pid
  // The rank's heap: its descriptor in that process (-1: it has none yet) and where it is mapped
  // there. Release by the owner, before the first message from it.
  std::atomic<int32_t> heap_descriptor;
  uint64_t heap_base;
  uint64_t probe;  // address of a word in the rank's memory that the others try to read
  std::atomic<uint32_t> reason_ready;
  char reason[kFailureText];  // why this rank closed or failed, for the errors of the others
  WaitPlace wait;
  PulsePlace pulse;
  CounterWords counters;
};

struct alignas(64) Header {
  uint64_t magic;
  uint32_t num_ranks;
  uint32_t payload_bytes;
};

struct Layout {
  uint32_t num_ranks;
  uint32_t payload_bytes;

  size_t channelBytes() const { return (sizeof(Channel) + payload_bytes + 4095) / 4096 * 4096; }
  size_t controlOffset(int rank) const { return sizeof(Header) + sizeof(Control) * rank; }
  size_t channelsOffset() const { return (controlOffset(num_ranks) + 4095) / 4096 * 4096; }
  size_t channelOffset(int src, int dst) const {
    return channelsOffset() + channelBytes() * (static_cast<size_t>(src) * num_ranks + dst);
  }
  size_t totalBytes() const { return channelOffset(num_ranks, 0); }
};

}  // namespace hdpcomm::shm
