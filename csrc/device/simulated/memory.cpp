#include "device/simulated/memory.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "device/arguments.hpp"

namespace hdpcomm::simulated {
namespace {

constexpr uint64_t kMagic = 0x31306d656d706468;  // "hdpmem01"
constexpr size_t kPage = 4096;

struct HandleContent {
  uint64_t magic = 0;
  int64_t pid = 0;
  int64_t fd = 0;
  uint64_t inode = 0;  // shows whether the descriptor is still that of the exported memory
  uint64_t bytes = 0;
  uint64_t address = 0;  // in the exporting process
};
static_assert(sizeof(HandleContent) <= MemoryHandle::kBytes);

Mapping map(size_t bytes, int flags, int fd) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) {
    throw Error(ErrorKind::kDevice,
                "cannot map " + std::to_string(bytes) +
                    " bytes of simulated device memory: " + std::strerror(errno));
  }
  return Mapping(address, bytes);
}

size_t pages(size_t bytes) {
  device::checkAllocation(bytes);
  if (bytes > (size_t{1} << 46)) {
    throw Error(ErrorKind::kDevice,
                "out of simulated device memory: " + std::to_string(bytes) + " bytes were asked");
  }
  return (bytes + kPage - 1) / kPage * kPage;
}

ino_t inodeOf(int fd) {
  struct stat info{};
  HDP_SYS(::fstat(fd, &info));
  return info.st_ino;
}

}  // namespace

MemoryTable& MemoryTable::get() {
  static MemoryTable* table = new MemoryTable;  // outlives every device
  return *table;
}

void* MemoryTable::insert(Blocks& blocks, Block block) {
  void* address = block.mapping.data();
  const std::lock_guard lock(mutex_);
  blocks.emplace(address, std::move(block));
  return address;
}

Mapping MemoryTable::take(Blocks& blocks, void* memory, const void* owner, const char* call) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks.find(memory);
  if (found == blocks.end() || found->second.owner != owner) {
    device::throwNotAllocated(call, memory);
  }
  Mapping mapping = std::move(found->second.mapping);
  blocks.erase(found);
  return mapping;
}

void* MemoryTable::allocate(size_t bytes, const void* owner) {
  const size_t rounded = pages(bytes);
  Fd fd(HDP_SYS(::memfd_create("hdpcomm-sim", MFD_CLOEXEC)));
  HDP_SYS(::ftruncate(fd.get(), static_cast<off_t>(rounded)));
  Mapping mapping = map(rounded, MAP_SHARED | MAP_NORESERVE, fd.get());
  return insert(device_, Block{std::move(fd), std::move(mapping), bytes, owner});
}

Mapping MemoryTable::release(void* memory, const void* owner) {
  return take(device_, memory, owner, "free");
}

void* MemoryTable::allocatePinned(size_t bytes, const void* owner) {
  const size_t rounded = pages(bytes);
  Mapping mapping = map(rounded, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  return insert(pinned_, Block{Fd(), std::move(mapping), bytes, owner});
}

Mapping MemoryTable::releasePinned(void* memory, const void* owner) {
  return take(pinned_, memory, owner, "freePinned");
}

void MemoryTable::registerPinned(void* memory, size_t bytes) {
  auto* begin = static_cast<std::byte*>(memory);
  device::checkPinned(memory, bytes);
  const std::lock_guard lock(mutex_);
  const auto next = registered_.lower_bound(begin);
  const bool overlaps =
      (next != registered_.end() && next->first < begin + bytes) ||
      (next != registered_.begin() && std::prev(next)->first + std::prev(next)->second > begin);
  if (overlaps) {
    device::throwRegistered(memory, bytes);
  }
  registered_.emplace(begin, bytes);
}

void MemoryTable::unregisterPinned(void* memory) {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(static_cast<std::byte*>(memory)) == 0) {
    device::throwNotRegistered(memory);
  }
}

MemoryHandle MemoryTable::exportMemory(void* memory, const void* owner) {
  const std::lock_guard lock(mutex_);
  const auto found = device_.find(memory);
  if (found == device_.end() || found->second.owner != owner) {
    device::throwNotExportable(memory);
  }
  const Block& block = found->second;
  const HandleContent content{kMagic,
                              ::getpid(),
                              block.fd.get(),
                              inodeOf(block.fd.get()),
                              block.mapping.bytes(),
                              reinterpret_cast<uint64_t>(memory)};
  MemoryHandle handle;
  std::memcpy(handle.bytes, &content, sizeof content);
  return handle;
}

void* MemoryTable::importMemory(const MemoryHandle& handle, const void* owner) {
  HandleContent content;
  std::memcpy(&content, handle.bytes, sizeof content);
  if (content.magic != kMagic) {
    throwInvalidUsage("importMemory: these bytes are no handle of a simulated device's memory");
  }
  const std::lock_guard lock(mutex_);
  if (content.pid == ::getpid()) {
    void* memory = reinterpret_cast<void*>(content.address);
    const auto block = device_.find(memory);
    if (block == device_.end() || inodeOf(block->second.fd.get()) != content.inode) {
      device::throwFreedExport();
    }
    ++imports_[{owner, memory}].uses;
    return memory;
  }
  for (auto& [key, import] : imports_) {
    if (key.first == owner && import.inode == content.inode) {
      ++import.uses;
      return key.second;
    }
  }
  const std::string path =
      "/proc/" + std::to_string(content.pid) + "/fd/" + std::to_string(content.fd);
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0 || inodeOf(fd.get()) != content.inode) {
    throw Error(ErrorKind::kDevice,
                "importMemory: process " + std::to_string(content.pid) +
                    " has no such memory any more, or cannot be looked into (" + path +
                    "): ranks of simulated devices run as one user in one pid namespace");
  }
  Mapping mapping = map(content.bytes, MAP_SHARED | MAP_NORESERVE, fd.get());
  void* memory = mapping.data();
  // The table may still have an import of this process's own freed memory at the same address,
  // which is to be closed later.
  Import& import = imports_[{owner, memory}];
  import.mapping = std::move(mapping);
  import.inode = static_cast<ino_t>(content.inode);
  ++import.uses;
  return memory;
}

void MemoryTable::closeMemory(void* memory, const void* owner) {
  const std::lock_guard lock(mutex_);
  const auto found = imports_.find({owner, memory});
  if (found == imports_.end()) {
    device::throwNotImported(memory);
  }
  if (--found->second.uses == 0) imports_.erase(found);
}

std::vector<Mapping> MemoryTable::releaseAll(const void* owner) {
  std::vector<Mapping> mappings;
  const std::lock_guard lock(mutex_);
  for (Blocks* blocks : {&device_, &pinned_}) {
    for (auto each = blocks->begin(); each != blocks->end();) {
      const bool owned = each->second.owner == owner;
      if (owned) mappings.push_back(std::move(each->second.mapping));
      each = owned ? blocks->erase(each) : std::next(each);
    }
  }
  std::erase_if(imports_, [&](const auto& item) { return item.first.first == owner; });
  return mappings;
}

size_t MemoryTable::blockBytes(const void* memory) const {
  const std::lock_guard lock(mutex_);
  for (const Blocks* blocks : {&device_, &pinned_}) {
    const auto found = blocks->find(const_cast<void*>(memory));
    if (found != blocks->end()) return found->second.bytes;
  }
  return 0;
}

}  // namespace hdpcomm::simulated
