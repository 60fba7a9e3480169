// Device and pinned memory of the simulated devices of this process. Device memory is a memfd, so
// that other processes can map it; it has no name and is gone with the last process that maps it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "device/device_api.hpp"

namespace hdpcomm::simulated {

// One per process, so that ranks that are threads import each other's memory at its own address.
// Thread-safe.
class MemoryTable {
 public:
  static MemoryTable& get();

  // `owner` is the device that allocates; only it may free.
  void* allocate(size_t bytes, const void* owner);
  // Removes the block from the table and returns its mapping, whose holder decides when the memory
  // is unmapped. Throws InvalidUsage for memory that the owner did not allocate.
  Mapping release(void* memory, const void* owner);
  void* allocatePinned(size_t bytes, const void* owner);
  Mapping releasePinned(void* memory, const void* owner);
  void registerPinned(void* memory, size_t bytes);
  void unregisterPinned(void* memory);

  MemoryHandle exportMemory(void* memory, const void* owner);
  // An import belongs to the device that makes it.
  void* importMemory(const MemoryHandle& handle, const void* owner);
  void closeMemory(void* memory, const void* owner);

  // Removes all blocks of a device from the table and closes its imports.
  std::vector<Mapping> releaseAll(const void* owner);
  // Bytes of the block that begins at this address, or 0.
  size_t blockBytes(const void* memory) const;

 private:
  struct Block {
    Fd fd;  // of device memory
    Mapping mapping;
    size_t bytes = 0;
    const void* owner = nullptr;
  };
  struct Import {
    Mapping mapping;  // empty for memory of this process
    ino_t inode = 0;
    size_t uses = 0;
  };
  using Blocks = std::map<void*, Block>;

  void* insert(Blocks& blocks, Block block);
  Mapping take(Blocks& blocks, void* memory, const void* owner, const char* call);

  mutable std::mutex mutex_;
  Blocks device_;
  Blocks pinned_;
  std::map<std::byte*, size_t> registered_;
  std::map<std::pair<const void*, void*>, Import> imports_;  // by owner and address
};

}  // namespace hdpcomm::simulated
