// Page-locked host memory, reserved once. Pinning takes 0.2 to 1 s per GB and stalls the device, so
// it must not happen in a training step. Blocks have the requested size, not the next power of two.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/fd.hpp"
#include "device/event_pool.hpp"

namespace hdpcomm::offload {

struct PoolOptions {
  size_t bytes = 0;
  int numa_node = -1;  // node of the pages; -1: that of the threads that touch them
  size_t chunk_bytes = size_t{64} << 30;  // per registration (drivers fail on much larger ones)
  int threads = 0;                        // to touch the pages; 0: one per core, at most 16
};

struct PoolStats {
  size_t capacity = 0;
  size_t in_use = 0;        // bytes of allocated blocks
  size_t retiring = 0;      // bytes of released blocks whose last copy may still run
  size_t largest_free = 0;  // largest range that is neither
  size_t peak_in_use = 0;   // since construction
  uint64_t allocations = 0;
  uint64_t stream_waits = 0;  // times that a stream had to wait until a block was free
  uint64_t refusals = 0;      // times that nothing fitted, even after all copies
  size_t chunks = 0;
  bool on_node = false;  // numa_node was given, and the kernel accepted it
};

// Thread-safe. No call blocks the host, and only the constructor allocates pinned memory.
class PinnedPool {
 public:
  static constexpr size_t kGranule = 256;  // blocks begin and end on multiples of it

  // Maps, touches and registers the arena. Throws InvalidUsage for a size of 0 or a node that does
  // not exist, Error if there is not enough memory.
  PinnedPool(DevicePtr device, const PoolOptions& options);
  // Frees the memory. The copies have to be done (CopyEngine makes sure of that).
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A block that later work of `stream` may write: if the block's last copy may still run, the
  // stream waits for it. Null if nothing fits even after all copies of released blocks.
  std::byte* allocate(size_t bytes, Stream stream);
  // Gives the block back; it is not used by work after `last_use`.
  void release(std::byte* block, Fence last_use);

  PoolStats stats() const;
  const DevicePtr& device() const noexcept { return device_; }

 private:
  struct Range {
    size_t bytes = 0;
    std::vector<Fence> fences;  // the next user of (part of) it has to wait for them
  };
  struct Retiring {
    size_t offset = 0;
    size_t bytes = 0;
    Fence last_use;
  };
  using Free = std::map<size_t, Range>;  // by offset; adjacent ranges are merged

  bool bindToNode(int node);
  void touch(int threads);
  void registerChunks(size_t chunk_bytes);
  void unregisterChunks() noexcept;

  // These need the lock.
  void reclaimDone();
  void insert(size_t offset, size_t bytes, std::vector<Fence> fences);
  std::optional<Free::iterator> bestFit(size_t bytes);
  std::byte* take(Free::iterator range, size_t bytes, Stream stream);

  DevicePtr device_;
  Mapping arena_;
  std::vector<std::byte*> chunks_;
  mutable std::mutex mutex_;  // guards all below
  Free free_;
  std::set<std::pair<size_t, size_t>> by_size_;  // (bytes, offset) of free_
  std::map<size_t, size_t> used_;                // offset to bytes
  std::deque<Retiring> retiring_;                // oldest first
  PoolStats stats_;
};

}  // namespace hdpcomm::offload
