#include "transport/host/shm/heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>

#include "base/error.hpp"
#include "transport/host/shm/shared_file.hpp"

namespace hdpcomm::shm {
namespace {

Mapping map(int fd, int protection) {
  void* address = ::mmap(nullptr, kHeapBytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) throwSystemError("mmap of a shared heap", __FILE__, __LINE__, errno);
  return Mapping(address, kHeapBytes);
}

}  // namespace

std::shared_ptr<Heap> Heap::create() {
  Fd fd = createSharedFile("hdpcomm-heap", kHeapBytes);
  Mapping mapping = map(fd.get(), PROT_READ | PROT_WRITE);
  return std::shared_ptr<Heap>(new Heap(std::move(fd), std::move(mapping)));
}

Heap::Heap(Fd fd, Mapping mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {
  free_.emplace(0, kHeapBytes);
}

std::shared_ptr<std::byte> Heap::allocate(size_t bytes) {
  if (bytes > kHeapBytes) {
    throwInvalidUsage("a block of " + std::to_string(bytes) +
                      " bytes was asked for; a rank's shared memory holds " +
                      std::to_string(kHeapBytes));
  }
  const size_t rounded =
      (std::max<size_t>(bytes, 1) + kHeapAlignment - 1) / kHeapAlignment * kHeapAlignment;
  std::lock_guard lock(mutex_);
  // First fit: low addresses are reused, so that few pages are ever touched.
  for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
    if (hole->second < rounded) continue;
    const size_t offset = hole->first;
    const size_t rest = hole->second - rounded;
    free_.erase(hole);
    if (rest > 0) free_.emplace(offset + rounded, rest);
    used_ += rounded;
    kept_ -= std::min(kept_, offset < touched_end_ ? rounded : 0);
    touched_end_ = std::max(touched_end_, offset + rounded);
    return {mapping_.data() + offset, [heap = shared_from_this(), offset, rounded](std::byte*) {
              heap->free(offset, rounded);
            }};
  }
  throwInvalidUsage("no hole of " + std::to_string(rounded) +
                    " bytes is left in this rank's shared memory; " + std::to_string(used_) +
                    " bytes are in use: drop tensors that comm.empty() gave");
}

void Heap::free(size_t offset, size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  used_ -= bytes;
  kept_ += bytes;
  if (kept_ > kKeptBytes) {
    // The kernel keeps pages that a peer is reading until it is done.
    if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0) {
      kept_ -= bytes;
    }
  }
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

bool Heap::contains(const void* data, size_t bytes) const noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto start = reinterpret_cast<uintptr_t>(mapping_.data());
  return address >= start && address + bytes <= start + mapping_.bytes();
}

PeerHeap::PeerHeap(int pid, int descriptor) {
  size_t bytes = 0;
  const Fd fd = openSharedFile(pid, descriptor, O_RDONLY, &bytes);
  if (bytes != kHeapBytes) {
    throw Error(ErrorKind::kInternal, "the heap of process " + std::to_string(pid) + " has " +
                                          std::to_string(bytes) + " bytes, not " +
                                          std::to_string(kHeapBytes));
  }
  mapping_ = map(fd.get(), PROT_READ);
}

}  // namespace hdpcomm::shm
