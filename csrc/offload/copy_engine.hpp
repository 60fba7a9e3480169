// Copies between device memory and the pinned pool, on a stream for each direction.
//
// The life of a ticket, and the five waits that keep its memory right:
//   store   the D2H stream waits for the compute stream (the data is written), then copies;
//           the pool may make it wait for the last reader of the block (PinnedPool::allocate)
//   settle  the compute stream waits for the D2H copy: now the caller may drop the device memory,
//           whose next owner is ordered after the compute stream
//   load    the H2D stream waits for the compute stream (earlier uses of the target's memory; and,
//           since the ticket is settled, the D2H copy of this block), then copies
//   arrive  the compute stream waits for the H2D copy
//   drop    the block goes back to the pool, free after its last copy
// load and arrive may be repeated until drop. Nothing of this blocks the host, where there is a
// compute stream. Where the host itself computes (CPU tensors on a SimDevice) it is the one that
// waits in settle and arrive; submission orders it before the copies.
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
  double host_wait_s = 0.0;  // of a computing host, in settle and arrive
};

// Thread-safe. The pool and the streams may be used by several threads, a ticket by one at a time.
class CopyEngine {
 public:
  using Ticket = uint64_t;

  // `timeout_s`: of the waits of a computing host, and of the last wait in the destructor.
  CopyEngine(std::shared_ptr<PinnedPool> pool, double timeout_s);
  // Waits for the copies; when they do not end in time, the pool's memory is never given back.
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Starts to copy `bytes` > 0 to the pool. 0: the pool is full, nothing happened.
  Ticket store(const void* source, size_t bytes, Compute compute);
  void settle(Ticket ticket, Compute compute);
  // Throws InvalidUsage when the ticket was not settled.
  void load(Ticket ticket, void* target, Compute compute);
  void arrive(Ticket ticket, Compute compute);
  void drop(Ticket ticket);
  // The host waits for all copies; throws Timeout.
  void drain(double timeout_s);

  CopyStats stats() const;
  const std::shared_ptr<PinnedPool>& pool() const noexcept { return pool_; }

 private:
  struct Entry {
    std::byte* block = nullptr;
    size_t bytes = 0;
    Fence last_copy;  // of the block, in either direction
    bool settled = false;
  };

  Entry& find(Ticket ticket, const char* call);
  void waitForCompute(Stream copies, Compute compute, Site site);
  void letWait(Compute compute, const Fence& fence, Site site);

  std::shared_ptr<PinnedPool> pool_;
  DevicePtr device_;
  double timeout_s_;
  std::shared_ptr<EventPool> events_;
  OwnedStream to_host_;
  OwnedStream to_device_;
  mutable std::mutex mutex_;  // all below
  std::unordered_map<Ticket, Entry> entries_;
  Ticket next_ = 1;
  CopyStats stats_;
};

}  // namespace hdpcomm::offload
