// A rank's heap: memory that the other processes of this host can map, so that a message from it
// takes one plain copy and no system call (process_vm_readv pins every page of every message).
//
// Like the segment it is an anonymous file. Its size is only address space: pages are allocated at
// the first touch, and of freed ones at most kKeptBytes are kept.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "base/fd.hpp"

namespace hdpcomm::shm {

inline constexpr size_t kHeapBytes = size_t{1} << 38;  // 256 GiB of address space
inline constexpr size_t kKeptBytes = size_t{256} << 20;
inline constexpr size_t kHeapAlignment = 4096;

class Heap : public std::enable_shared_from_this<Heap> {
 public:
  // Throws Error when the system refuses the file or the address space.
  static std::shared_ptr<Heap> create();

  int descriptor() const noexcept { return fd_.get(); }
  // A block of at least `bytes`, freed with its last reference. The blocks keep the heap alive.
  std::shared_ptr<std::byte> allocate(size_t bytes);
  const std::byte* base() const noexcept { return mapping_.data(); }
  bool contains(const void* data, size_t bytes) const noexcept;

 private:
  Heap(Fd fd, Mapping mapping);
  void free(size_t offset, size_t bytes) noexcept;

  Fd fd_;
  Mapping mapping_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes; neighbours are merged
  size_t used_ = 0;
  size_t touched_end_ = 0;  // end of the highest block ever allocated
  size_t kept_ = 0;         // freed bytes whose pages were kept
};

// The heap of another process, mapped for reading.
class PeerHeap {
 public:
  PeerHeap() = default;
  // Maps the file `descriptor` of process `pid`. Throws Error when it cannot be opened.
  PeerHeap(int pid, int descriptor);
  bool mapped() const noexcept { return mapping_.data() != nullptr; }
  const std::byte* base() const noexcept { return mapping_.data(); }

 private:
  Mapping mapping_;
};

}  // namespace hdpcomm::shm
