// Page-locked host memory, reserved once. Pinning costs 0.2 to 1 s per GB and stalls the device, so
// none of it may happen in a training step; and a block has the size that was asked for, not the
// next power of two.
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
  int numa_node = -1;  // where the pages shall lie; -1: where the touching threads run
  size_t chunk_bytes = size_t{64} << 30;  // of one registration (drivers fail on much larger ones)
  int threads = 0;  // that touch the pages; 0: as many as there are cores, 16 at most
};

struct PoolStats {
  size_t capacity = 0;
  size_t in_use = 0;        // of blocks that are held
  size_t retiring = 0;      // of released blocks whose last copy may still run
  size_t largest_free = 0;  // of the ranges that are neither
  size_t peak_in_use = 0;   // since the pool was made, or resetPeak
  uint64_t allocations = 0;
  uint64_t stream_waits = 0;  // a copy had to wait on the device until a block was free
  uint64_t refusals = 0;      // nothing fitted, even after all copies
  size_t chunks = 0;
  bool on_node = false;  // the pages were asked for on numa_node, and the kernel agreed
};

// Thread-safe; no call blocks the host, and after the constructor none allocates pinned memory.
class PinnedPool {
 public:
  static constexpr size_t kGranule = 256;  // blocks begin and end on multiples of it

  // Maps, touches and registers the arena. Throws InvalidUsage for a size of 0 or a node that there
  // is not, Error when the memory cannot be had.
  PinnedPool(DevicePtr device, const PoolOptions& options);
  // Gives the memory back. The copies have to be done (CopyEngine sees to that).
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A block that later work of `stream` may write: where its last copy may still run, the stream
  // waits for that one. Null when nothing fits even after all released blocks are done.
  std::byte* allocate(size_t bytes, Stream stream);
  // The block is not used any more by work after `last_use`.
  void release(std::byte* block, Fence last_use);

  PoolStats stats() const;
  void resetPeak();
  const DevicePtr& device() const noexcept { return device_; }

 private:
  struct Range {
    size_t bytes = 0;
    std::vector<Fence> fences;  // who takes (part of) it has to wait for them
  };
  struct Retiring {
    size_t offset = 0;
    size_t bytes = 0;
    Fence last_use;
  };
  using Free = std::map<size_t, Range>;  // by offset; no two touch each other

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
  mutable std::mutex mutex_;  // all below
  Free free_;
  std::set<std::pair<size_t, size_t>> by_size_;  // (bytes, offset) of free_
  std::map<size_t, size_t> used_;                // offset to bytes
  std::deque<Retiring> retiring_;                // oldest first
  PoolStats stats_;
};

}  // namespace hdpcomm::offload
