// The symmetric arena: one block of device memory a rank, laid out alike on all ranks and mapped by
// all of them. It holds, for every peer, the slots in which the peer's messages arrive, and the
// flags that the streams of both sides wait for; one landing zone for messages that are put at
// their final place; and one window, which the kernels of peers read and write (peer_reads.hpp).
//
// A flag is 0 or 1: one side writes 1, the stream that waited for it writes 0 again. So whatever
// was enqueued once may run many times (a CUDA graph), and no counter has to live on the device.
//
//   flag          lies on    1 means
//   credit[slot]  sender     the receiver has emptied the slot (at the start: all)
//   full[slot]    receiver   the sender has filled the slot
//   clear         sender     the receiver's landing place may be written
//   landed        receiver   the message is at its landing place
//   published     reader     the peer's operand may be read
//   consumed      owner      the peer has read and written what it had to in this rank's memory
//
// Small messages have slots and flags of their own (small_messages.hpp), of the same meaning.
#pragma once

#include <memory>
#include <vector>

#include "device/handles.hpp"

namespace hdpcomm::device {

inline constexpr int kMaxSlots = 16;
inline constexpr int kMaxLanes = 4;  // streams of a direction of a pair
inline constexpr int kSmallSlots = 4;
inline constexpr size_t kSmallSlotBytes = 8192;
// Room for 128 bytes of each of 64 peers (kernels::kMaxPeers).
inline constexpr size_t kLeastWindow = 8192;

struct ArenaConfig {
  size_t slot_bytes = 0;  // a multiple of 4096; 0: see withSlotBytes()
  int num_slots = 4;      // of a pair; a multiple of num_lanes
  int num_lanes = 2;
  size_t landing_bytes = 64 << 20;
  size_t window_bytes = 32 << 20;
  size_t small_bytes = kSmallSlotBytes;  // most of a message that is a part of one kernel

  bool operator==(const ArenaConfig&) const = default;
};

// The configuration with a number for slot bytes, where at most so many ranks share a host. Large
// slots, since the host needs some 11 us for the calls of a piece, whatever its size (measured on
// an H100: 64 MiB at 190 GB/s in slots of 2 MiB, at 272 and 452 GB/s in slots of 8 MiB).
ArenaConfig withSlotBytes(const ArenaConfig& config, int most_ranks);

// Device memory of a rank's arena, with its slot bytes, where so many ranks share a host.
size_t arenaBytes(const ArenaConfig& config, int num_ranks);

// Throws InvalidUsage with the limits.
void checkArenaConfig(const ArenaConfig& config);

struct alignas(64) PairFlags {
  uint32_t credit[kMaxSlots];
  uint32_t full[kMaxSlots];
  uint32_t clear;
  uint32_t landed;
  uint32_t published;
  uint32_t consumed;
  uint32_t small_credit[kSmallSlots];
  uint32_t small_full[kSmallSlots];
};

class Arena {
 public:
  // Allocates this rank's block and sets its flags to their start; synchronizes.
  Arena(DevicePtr device, ArenaConfig config, int num_ranks, int rank);

  MemoryHandle exportOwn() const;
  // Maps another rank's block.
  void importPeer(int peer, const MemoryHandle& handle);

  // From now on no message is small.
  void withoutSmall() { config_.small_bytes = 0; }

  DeviceApi& device() const { return *device_; }
  const ArenaConfig& config() const { return config_; }
  int numRanks() const { return num_ranks_; }
  // The flags in the block of `owner` that concern it and `peer`.
  PairFlags& flags(int owner, int peer) const;
  // The slot in the block of `owner` for messages of `peer`.
  std::byte* slot(int owner, int peer, int slot) const;
  std::byte* landing(int owner) const;
  std::byte* window(int owner) const;
  // As slot(), for small messages.
  std::byte* smallSlot(int owner, int peer, int slot) const;
  size_t bytes() const;

 private:
  size_t slotsOffset() const;
  size_t landingOffset() const;

  DevicePtr device_;
  ArenaConfig config_;
  int num_ranks_;
  int rank_;
  DeviceMemory own_;
  std::vector<ImportedMemory> imports_;
  std::vector<std::byte*> blocks_;  // by rank
};

}  // namespace hdpcomm::device
