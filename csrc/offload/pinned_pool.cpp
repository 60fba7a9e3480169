#include "offload/pinned_pool.hpp"

#include <linux/mempolicy.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

#include "base/error.hpp"

namespace hdpcomm::offload {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t roundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

Mapping mapArena(size_t bytes) {
  if (bytes == 0) throwInvalidUsage("a pinned pool of 0 bytes was asked for; give a size above 0");
  const size_t rounded = roundUp(bytes, kPage);
  void* address =
      ::mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorKind::kInternal, "cannot map " + std::to_string(rounded) +
                                          " bytes of host memory for the pinned pool (" +
                                          std::strerror(errno) + "); ask for a smaller pool");
  }
  // A hint: huge pages are fewer to lock, and need fewer entries in the device's page tables.
  if (rounded >= kHugePage) ::madvise(address, rounded, MADV_HUGEPAGE);
  return Mapping(address, rounded);
}

}  // namespace

PinnedPool::PinnedPool(DevicePtr device, const PoolOptions& options)
    : device_(std::move(device)), arena_(mapArena(options.bytes)) {
  if (options.chunk_bytes < kPage) {
    throwInvalidUsage("chunk_bytes is " + std::to_string(options.chunk_bytes) +
                      "; give at least a page, 4096");
  }
  stats_.on_node = options.numa_node >= 0 && bindToNode(options.numa_node);
  touch(options.threads);
  try {
    registerChunks(options.chunk_bytes);
  } catch (...) {
    unregisterChunks();
    throw;
  }
  stats_.capacity = arena_.bytes();
  stats_.chunks = chunks_.size();
  insert(0, arena_.bytes(), {});
}

PinnedPool::~PinnedPool() {
  unregisterChunks();
  try {
    device_->annotateFree(arena_.data(), arena_.bytes());
  } catch (...) {  // the call matters to SimDevice's check mode only
  }
}

// Returns false if the kernel does not allow it (no NUMA support, or a container without the
// right).
bool PinnedPool::bindToNode(int node) {
  constexpr int kMostNodes = 1024;
  constexpr int kWord = 8 * sizeof(unsigned long);
  if (node >= kMostNodes) {
    throwInvalidUsage("NUMA node " + std::to_string(node) + " was asked for; Linux has at most " +
                      std::to_string(kMostNodes));
  }
  unsigned long mask[kMostNodes / kWord] = {};
  mask[node / kWord] = 1ul << (node % kWord);
  const long result =
      ::syscall(SYS_mbind, arena_.data(), arena_.bytes(), MPOL_PREFERRED, mask, kMostNodes + 1, 0);
  if (result == 0) return true;
  if (errno == EINVAL) {
    throwInvalidUsage("NUMA node " + std::to_string(node) +
                      " was asked for and this host has no such node; leave numa_node out");
  }
  return false;
}

// Touches all pages, on several threads: locking pages that exist is several times faster than
// having the lock create them one by one.
void PinnedPool::touch(int threads) {
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t pages = arena_.bytes() / kPage;
  size_t count = threads > 0 ? static_cast<size_t>(threads) : std::min<size_t>(cores, 16);
  count = std::clamp<size_t>(pages / 512, 1, count);
  const auto work = [this, pages, count](size_t part) {
    for (size_t page = pages * part / count; page < pages * (part + 1) / count; ++page) {
      *static_cast<volatile std::byte*>(arena_.data() + page * kPage) = std::byte{0};
    }
  };
  std::vector<std::jthread> helpers;
  for (size_t part = 1; part < count; ++part) helpers.emplace_back(work, part);
  work(0);
}

void PinnedPool::registerChunks(size_t chunk_bytes) {
  const size_t step = chunk_bytes / kPage * kPage;
  for (size_t offset = 0; offset < arena_.bytes(); offset += step) {
    std::byte* chunk = arena_.data() + offset;
    device_->registerPinned(chunk, std::min(step, arena_.bytes() - offset));
    chunks_.push_back(chunk);
  }
}

void PinnedPool::unregisterChunks() noexcept {
  for (std::byte* chunk : chunks_) {
    try {
      device_->unregisterPinned(chunk);
    } catch (...) {  // the device reports its fault on the next call that may throw
    }
  }
  chunks_.clear();
}

void PinnedPool::insert(size_t offset, size_t bytes, std::vector<Fence> fences) {
  auto next = free_.lower_bound(offset);
  const auto absorb = [&](Free::iterator range) {
    by_size_.erase({range->second.bytes, range->first});
    bytes += range->second.bytes;
    fences.insert(fences.end(), range->second.fences.begin(), range->second.fences.end());
    return free_.erase(range);
  };
  if (next != free_.end() && next->first == offset + bytes) next = absorb(next);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == offset) {
      offset = before->first;
      absorb(before);
    }
  }
  by_size_.emplace(bytes, offset);
  free_.emplace(offset, Range{bytes, std::move(fences)});
}

void PinnedPool::reclaimDone() {
  while (!retiring_.empty() && device_->query(*retiring_.front().last_use)) {
    const Retiring block = std::move(retiring_.front());
    retiring_.pop_front();
    stats_.retiring -= block.bytes;
    insert(block.offset, block.bytes, {});
  }
}

// The smallest range without pending fences, else the smallest one with some.
std::optional<PinnedPool::Free::iterator> PinnedPool::bestFit(size_t bytes) {
  std::optional<Free::iterator> fenced;
  for (auto item = by_size_.lower_bound({bytes, 0}); item != by_size_.end(); ++item) {
    const auto range = free_.find(item->second);
    std::erase_if(range->second.fences, [this](const Fence& f) { return device_->query(*f); });
    if (range->second.fences.empty()) return range;
    if (!fenced) fenced = range;
  }
  return fenced;
}

std::byte* PinnedPool::take(Free::iterator range, size_t bytes, Stream stream) {
  const size_t offset = range->first;
  Range found = std::move(range->second);
  for (const Fence& fence : found.fences) device_->wait(stream, *fence);
  if (!found.fences.empty()) ++stats_.stream_waits;
  by_size_.erase({found.bytes, offset});
  free_.erase(range);
  if (found.bytes > bytes) insert(offset + bytes, found.bytes - bytes, std::move(found.fences));
  used_.emplace(offset, bytes);
  ++stats_.allocations;
  stats_.in_use += bytes;
  stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
  return arena_.data() + offset;
}

std::byte* PinnedPool::allocate(size_t bytes, Stream stream) {
  if (bytes == 0) throwInvalidUsage("a pinned block of 0 bytes was asked for");
  const size_t rounded = roundUp(bytes, kGranule);
  const std::lock_guard lock(mutex_);
  reclaimDone();
  for (;;) {
    if (const auto range = bestFit(rounded)) return take(*range, rounded, stream);
    if (retiring_.empty()) break;
    const Retiring block = std::move(retiring_.front());
    retiring_.pop_front();
    stats_.retiring -= block.bytes;
    insert(block.offset, block.bytes, {block.last_use});
  }
  ++stats_.refusals;
  return nullptr;
}

void PinnedPool::release(std::byte* block, Fence last_use) {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(static_cast<size_t>(block - arena_.data()));
  if (found == used_.end()) throwInvalidUsage("the pinned pool has given out no such block");
  const auto [offset, bytes] = *found;
  used_.erase(found);
  stats_.in_use -= bytes;
  stats_.retiring += bytes;
  retiring_.push_back({offset, bytes, std::move(last_use)});
}

PoolStats PinnedPool::stats() const {
  const std::lock_guard lock(mutex_);
  PoolStats stats = stats_;
  stats.largest_free = by_size_.empty() ? 0 : by_size_.rbegin()->first;
  return stats;
}

}  // namespace hdpcomm::offload
