// Memory of CUDA devices: allocation, pinning, and sharing between processes.
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "device/arguments.hpp"
#include "device/cuda/cuda_device.hpp"

namespace hdpcomm::cuda {
namespace {

constexpr uint64_t kMagic = 0x3130616475637068;  // "hpcuda01"
// An IPC handle opens the driver's whole block; allocations of 2 MiB each share it with no other.
constexpr size_t kBlock = size_t{2} << 20;

struct HandleContent {
  uint64_t magic = 0;
  uint64_t process = 0;  // random: pids are reused, and differ between namespaces
  int64_t ordinal = 0;
  uint64_t address = 0;  // in the exporting process
  uint64_t serial = 0;   // of the allocation: addresses are reused
  IpcHandle ipc{};
};
static_assert(sizeof(HandleContent) <= MemoryHandle::kBytes);

uint64_t thisProcess() {
  static const uint64_t token = [] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }();
  return token;
}

// Device memory of this process, so that ranks that are threads can import each other's memory.
struct Allocation {
  const void* owner = nullptr;
  uint64_t serial = 0;
};
std::mutex allocations_mutex;
uint64_t next_serial = 1;
std::map<void*, Allocation>& allocations() {
  static auto* all = new std::map<void*, Allocation>;
  return *all;
}

// While it lives, this thread may allocate though a stream is captured into a graph: that breaks
// the capture otherwise. Memory is none of what a graph records.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) : driver_(driver) {
    HDP_CUDA(driver_, cuThreadExchangeStreamCaptureMode(&mode_));
  }
  ~Relaxed() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  const Driver& driver_;
  int mode_ = kCaptureRelaxed;  // then that of before
};

}  // namespace

void CudaDevice::releaseMemory() noexcept {
  if (driver_->cuCtxPushCurrent_v2(context_) != kSuccess) return;
  for (const auto& [memory, import] : imports_) {
    if (import.opened) driver_->cuIpcCloseMemHandle(pointer(memory));
  }
  for (const auto& [memory, bytes] : pinned_) driver_->cuMemFreeHost(memory);
  const std::lock_guard lock(allocations_mutex);
  std::erase_if(allocations(), [this](const auto& item) {
    if (item.second.owner != this) return false;
    driver_->cuMemFree_v2(pointer(item.first));
    return true;
  });
  Context context = nullptr;
  driver_->cuCtxPopCurrent_v2(&context);
}

void* CudaDevice::allocate(size_t bytes, Site) {
  device::checkAllocation(bytes);
  const Guard guard(*this);
  const Relaxed relaxed(*driver_);
  Pointer memory = 0;
  HDP_CUDA(*driver_, cuMemAlloc_v2(&memory, (bytes + kBlock - 1) / kBlock * kBlock));
  void* address = reinterpret_cast<void*>(memory);
  const std::lock_guard lock(allocations_mutex);
  allocations()[address] = {this, next_serial++};
  return address;
}

void CudaDevice::free(void* memory, Site) {
  const Guard guard(*this);
  {
    const std::lock_guard lock(allocations_mutex);
    const auto found = allocations().find(memory);
    if (found == allocations().end() || found->second.owner != this) {
      device::throwNotAllocated("free", memory);
    }
    allocations().erase(found);
  }
  HDP_CUDA(*driver_, cuMemFree_v2(pointer(memory)));
}

void* CudaDevice::allocatePinned(size_t bytes, Site) {
  device::checkAllocation(bytes);
  const Guard guard(*this);
  void* memory = nullptr;
  HDP_CUDA(*driver_, cuMemHostAlloc(&memory, bytes, kHostPortable | kHostDeviceMap));
  const std::lock_guard lock(mutex_);
  pinned_[memory] = bytes;
  return memory;
}

void CudaDevice::freePinned(void* memory, Site) {
  const Guard guard(*this);
  {
    const std::lock_guard lock(mutex_);
    if (pinned_.erase(memory) == 0) device::throwNotAllocated("freePinned", memory);
  }
  HDP_CUDA(*driver_, cuMemFreeHost(memory));
}

void CudaDevice::registerPinned(void* memory, size_t bytes) {
  device::checkPinned(memory, bytes);
  const Guard guard(*this);
  const Result result =
      driver_->cuMemHostRegister_v2(memory, bytes, kHostPortable | kHostDeviceMap);
  if (result == kHostMemoryAlreadyRegistered) device::throwRegistered(memory, bytes);
  driver_->check(result, "cuMemHostRegister_v2(memory, bytes, ..)", __FILE__, __LINE__);
}

void CudaDevice::unregisterPinned(void* memory) {
  const Guard guard(*this);
  const Result result = driver_->cuMemHostUnregister(memory);
  if (result == kHostMemoryNotRegistered) device::throwNotRegistered(memory);
  driver_->check(result, "cuMemHostUnregister(memory)", __FILE__, __LINE__);
}

MemoryHandle CudaDevice::exportMemory(void* memory) {
  HandleContent content{kMagic, thisProcess(), ordinal_, pointer(memory), 0, {}};
  {
    const std::lock_guard lock(allocations_mutex);
    const auto found = allocations().find(memory);
    if (found == allocations().end() || found->second.owner != this) {
      device::throwNotExportable(memory);
    }
    content.serial = found->second.serial;
  }
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuIpcGetMemHandle(&content.ipc, content.address));
  MemoryHandle handle;
  std::memcpy(handle.bytes, &content, sizeof content);
  return handle;
}

void CudaDevice::enablePeer(int other_ordinal) {
  if (other_ordinal == ordinal_) return;
  if (!canAccessPeer(other_ordinal)) {
    throw Error(ErrorKind::kDevice,
                "CUDA device " + std::to_string(ordinal_) + " cannot access the memory of device " +
                    std::to_string(other_ordinal) + ": they have no peer access to each other");
  }
  Ordinal other = 0;
  HDP_CUDA(*driver_, cuDeviceGet(&other, other_ordinal));
  Context context = nullptr;
  // Retained only to learn its handle; the owner of the memory, a device of this process, keeps the
  // context alive.
  HDP_CUDA(*driver_, cuDevicePrimaryCtxRetain(&context, other));
  const Result result = driver_->cuCtxEnablePeerAccess(context, 0);
  driver_->cuDevicePrimaryCtxRelease_v2(other);
  if (result == kPeerAccessAlreadyEnabled) return;
  driver_->check(result, "cuCtxEnablePeerAccess(context, 0)", __FILE__, __LINE__);
}

void* CudaDevice::importMemory(const MemoryHandle& handle) {
  HandleContent content;
  std::memcpy(&content, handle.bytes, sizeof content);
  if (content.magic != kMagic) {
    throwInvalidUsage("importMemory: these bytes are no handle of a CUDA device's memory");
  }
  const Guard guard(*this);
  const std::string key(reinterpret_cast<const char*>(handle.bytes), sizeof content);
  const std::lock_guard lock(mutex_);
  for (auto& [memory, import] : imports_) {
    if (!import.opened || import.key != key) continue;
    ++import.uses;
    return memory;
  }
  if (content.process == thisProcess()) {
    void* memory = reinterpret_cast<void*>(content.address);
    {
      const std::lock_guard all(allocations_mutex);
      const auto found = allocations().find(memory);
      if (found == allocations().end() || found->second.serial != content.serial) {
        device::throwFreedExport();
      }
    }
    enablePeer(static_cast<int>(content.ordinal));
    ++imports_[memory].uses;
    return memory;
  }
  Pointer memory = 0;
  HDP_CUDA(*driver_, cuIpcOpenMemHandle_v2(&memory, content.ipc, kIpcLazyPeerAccess));
  void* address = reinterpret_cast<void*>(memory);
  imports_[address] = {key, true, 1};
  return address;
}

void CudaDevice::closeMemory(void* memory) {
  const Guard guard(*this);
  const std::lock_guard lock(mutex_);
  const auto found = imports_.find(memory);
  if (found == imports_.end()) device::throwNotImported(memory);
  if (--found->second.uses > 0) return;
  const bool opened = found->second.opened;
  imports_.erase(found);
  if (opened) HDP_CUDA(*driver_, cuIpcCloseMemHandle(pointer(memory)));
}

}  // namespace hdpcomm::cuda
