#include "transport/stream/links/arena.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::device {
namespace {

size_t slotsOffsetFor(int num_ranks) {
  return (sizeof(PairFlags) * static_cast<size_t>(num_ranks) + 4095) / 4096 * 4096;
}

size_t landingOffsetFor(const ArenaConfig& config, int num_ranks) {
  return slotsOffsetFor(num_ranks) +
         config.slot_bytes * static_cast<size_t>(config.num_slots) * static_cast<size_t>(num_ranks);
}

size_t smallOffsetFor(const ArenaConfig& config, int num_ranks) {
  return landingOffsetFor(config, num_ranks) + config.landing_bytes + config.window_bytes;
}

}  // namespace

size_t arenaBytes(const ArenaConfig& config, int num_ranks) {
  return smallOffsetFor(config, num_ranks) +
         kSmallSlotBytes * kSmallSlots * static_cast<size_t>(num_ranks);
}

ArenaConfig withSlotBytes(const ArenaConfig& config, int most_ranks) {
  constexpr size_t kLeast = size_t{2} << 20;
  constexpr size_t kMost = size_t{8} << 20;
  constexpr size_t kAllSlots = size_t{256} << 20;  // of a rank
  ArenaConfig result = config;
  if (result.slot_bytes == 0) {
    const auto slots = static_cast<size_t>(std::max(1, most_ranks) * std::max(1, config.num_slots));
    result.slot_bytes = std::clamp(kAllSlots / slots / 4096 * 4096, kLeast, kMost);
  }
  return result;
}

void checkArenaConfig(const ArenaConfig& config) {
  if (config.slot_bytes < 4096 || config.slot_bytes % 4096 != 0) {
    throwInvalidUsage("slots of " + std::to_string(config.slot_bytes) +
                      " bytes were asked for; give a multiple of 4096");
  }
  if (config.num_lanes < 1 || config.num_lanes > kMaxLanes) {
    throwInvalidUsage(std::to_string(config.num_lanes) + " lanes were asked for; give 1 to " +
                      std::to_string(kMaxLanes));
  }
  if (config.num_slots < config.num_lanes || config.num_slots > kMaxSlots ||
      config.num_slots % config.num_lanes != 0) {
    throwInvalidUsage(
        std::to_string(config.num_slots) + " slots were asked for; give a multiple of the " +
        std::to_string(config.num_lanes) + " lanes up to " + std::to_string(kMaxSlots));
  }
  if (config.landing_bytes % 4096 != 0) {
    throwInvalidUsage("a landing zone of " + std::to_string(config.landing_bytes) +
                      " bytes was asked for; give a multiple of 4096");
  }
  if (config.window_bytes < kLeastWindow || config.window_bytes % 4096 != 0) {
    throwInvalidUsage("a window of " + std::to_string(config.window_bytes) +
                      " bytes was asked for; give a multiple of 4096 from " +
                      std::to_string(kLeastWindow) + " up");
  }
  if (config.small_bytes > kSmallSlotBytes) {
    throwInvalidUsage("small messages of " + std::to_string(config.small_bytes) +
                      " bytes were asked for; give 0 to " + std::to_string(kSmallSlotBytes));
  }
}

Arena::Arena(DevicePtr device, ArenaConfig config, int num_ranks, int rank)
    : device_(std::move(device)),
      config_(config),
      num_ranks_(num_ranks),
      rank_(rank),
      blocks_(static_cast<size_t>(num_ranks)) {
  checkArenaConfig(config_);
  own_ = DeviceMemory(device_, device_->allocate(bytes()));
  blocks_[static_cast<size_t>(rank)] = static_cast<std::byte*>(own_.get());
  const OwnedStream stream(device_, device_->createStream());
  device_->fill(own_.get(), 0, slotsOffset(), stream.get());
  for (int peer = 0; peer < num_ranks; ++peer) {
    PairFlags& pair = flags(rank, peer);
    for (int slot = 0; slot < config_.num_slots; ++slot) {
      device_->writeValue(stream.get(), &pair.credit[slot], 1);
    }
    for (uint32_t& credit : pair.small_credit) device_->writeValue(stream.get(), &credit, 1);
  }
  device_->synchronize(stream.get(), 60);
}

MemoryHandle Arena::exportOwn() const { return device_->exportMemory(own_.get()); }

void Arena::importPeer(int peer, const MemoryHandle& handle) {
  imports_.emplace_back(device_, device_->importMemory(handle));
  blocks_[static_cast<size_t>(peer)] = static_cast<std::byte*>(imports_.back().get());
}

PairFlags& Arena::flags(int owner, int peer) const {
  return reinterpret_cast<PairFlags*>(blocks_[static_cast<size_t>(owner)])[peer];
}

size_t Arena::slotsOffset() const { return slotsOffsetFor(num_ranks_); }

size_t Arena::landingOffset() const { return landingOffsetFor(config_, num_ranks_); }

size_t Arena::bytes() const { return arenaBytes(config_, num_ranks_); }

std::byte* Arena::slot(int owner, int peer, int slot) const {
  return blocks_[static_cast<size_t>(owner)] + slotsOffset() +
         config_.slot_bytes * static_cast<size_t>(peer * config_.num_slots + slot);
}

std::byte* Arena::landing(int owner) const {
  return blocks_[static_cast<size_t>(owner)] + landingOffset();
}

std::byte* Arena::window(int owner) const { return landing(owner) + config_.landing_bytes; }

std::byte* Arena::smallSlot(int owner, int peer, int slot) const {
  return blocks_[static_cast<size_t>(owner)] + smallOffsetFor(config_, num_ranks_) +
         kSmallSlotBytes * static_cast<size_t>(peer * kSmallSlots + slot);
}

}  // namespace hdpcomm::device
