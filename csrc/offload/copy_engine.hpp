// Copies between device memory and the pinned pool, on one stream for each direction.
//
// The life of a ticket, and the five waits that keep its memory valid:
//   store        the D2H stream waits for the compute stream (the data is written), then copies;
//                the pool may make it wait for the last reader of the block (PinnedPool::allocate)
//   finishStore  the compute stream waits for the D2H copy: now the caller may drop the device
//                memory, whose next owner is ordered after the compute stream
//   load         the H2D stream waits for the compute stream (earlier uses of the target's memory
//                and, by finishStore, the D2H copy of this block), then copies
//   finishLoad   the compute stream waits for the H2D copy
//   drop         the block goes back to the pool, free after its last copy
// load and finishLoad may be repeated until drop. With a compute stream, nothing of this blocks the
// host. Where the host itself computes (CPU tensors on a SimDevice), the host waits in finishStore
// and finishLoad, and submission orders its writes before the copies.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

#include "offload/pinned_pool.hpp"

namespace hdpcomm::offload {

// Who computes: a stream, or the calling thread.
using Compute = std::optional<Stream>;

struct CopyStats {
  uint64_t stores = 0;
  uint64_t loads = 0;
  uint64_t bytes_stored = 0;
  uint64_t bytes_loaded = 0;
  size_t tickets = 0;        // that are not dropped
  double host_wait_s = 0.0;  // where the host computes: in finishStore and finishLoad
};

// Thread-safe, but a ticket may be used by only one thread at a time.
class CopyEngine {
 public:
  using Ticket = uint64_t;

  // `timeout_s`: limit of the host's waits where the host computes, and of the destructor's wait.
  CopyEngine(std::shared_ptr<PinnedPool> pool, double timeout_s);
  // Waits for the copies and drops all tickets; if the copies do not end in time, the pool's memory
  // is never freed.
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Starts to copy `bytes` > 0 to the pool. Returns 0 if the pool is full; nothing happened then.
  Ticket store(const void* source, size_t bytes, Compute compute);
  void finishStore(Ticket ticket, Compute compute);
  // Throws InvalidUsage before finishStore.
  void load(Ticket ticket, void* target, Compute compute);
  void finishLoad(Ticket ticket, Compute compute);
  void drop(Ticket ticket);
  // The host waits for all copies; throws Timeout.
  void drain(double timeout_s);

  CopyStats stats() const;
  const std::shared_ptr<PinnedPool>& pool() const noexcept { return pool_; }

 private:
  struct Entry {
    std::byte* block = nullptr;
    size_t bytes = 0;
    Fence last_copy;      // of the block, in either direction
    bool stored = false;  // finishStore was called
  };

  Entry& find(Ticket ticket, const char* call);
  void waitForCompute(Stream copies, Compute compute, Site site);
  void makeComputeWait(Compute compute, const Fence& fence, Site site);

  std::shared_ptr<PinnedPool> pool_;
  DevicePtr device_;
  double timeout_s_;
  std::shared_ptr<EventPool> events_;
  OwnedStream to_host_;
  OwnedStream to_device_;
  mutable std::mutex mutex_;  // guards all below
  std::unordered_map<Ticket, Entry> entries_;
  Ticket next_ = 1;
  CopyStats stats_;
};

}  // namespace hdpcomm::offload
