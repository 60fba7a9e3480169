#include "cuda_device.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "../arguments.hpp"
#include "hdpcomm/base/error.hpp"
#include "hdpcomm/device/devices.hpp"

namespace hdpcomm::cuda {
namespace {

using device::hexOf;

constexpr uint64_t kMagic = 0x3130616475637068;  // "hpcuda01"
// An IPC handle opens the driver's whole block: with 2 MiB each, no other allocation lies in it.
constexpr size_t kBlock = size_t{2} << 20;

struct HandleContent {
  uint64_t magic = 0;
  uint64_t process = 0;  // drawn at random: process numbers come again, and differ by namespace
  int64_t ordinal = 0;
  uint64_t address = 0;  // in the exporting process
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

Pointer pointer(const void* memory) { return reinterpret_cast<Pointer>(memory); }
DriverStream raw(Stream stream) { return reinterpret_cast<DriverStream>(stream.handle); }
DriverEvent raw(Event event) { return reinterpret_cast<DriverEvent>(event.handle); }

// Device memory of this process, so that a rank that is a thread can import what another exported.
struct Allocation {
  const void* owner = nullptr;
  int ordinal = 0;
};
std::mutex allocations_mutex;
std::map<void*, Allocation>& allocations() {
  static auto* all = new std::map<void*, Allocation>;
  return *all;
}

}  // namespace

class CudaDevice::Guard {
 public:
  explicit Guard(const CudaDevice& device) : driver_(*device.driver_) {
    HDP_CUDA(driver_, cuCtxPushCurrent_v2(device.context_));
  }
  ~Guard() {
    Context context = nullptr;
    driver_.cuCtxPopCurrent_v2(&context);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  const Driver& driver_;
};

CudaDevice::CudaDevice(std::shared_ptr<const Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal) {
  int count = 0;
  const Result counted = driver_->cuDeviceGetCount(&count);
  if (counted != kNoDevice) {
    driver_->check(counted, "cuDeviceGetCount(&count)", __FILE__, __LINE__);
  }
  if (ordinal < 0 || ordinal >= count) {
    throwInvalidUsage("there is no CUDA device " + std::to_string(ordinal) +
                      ": this process sees " + std::to_string(count) +
                      " (CUDA_VISIBLE_DEVICES may hide some)");
  }
  HDP_CUDA(*driver_, cuDeviceGet(&device_, ordinal));
  char text[128] = {};
  HDP_CUDA(*driver_, cuDeviceGetName(text, sizeof text - 1, device_));
  name_ = text;
  HDP_CUDA(*driver_, cuDevicePrimaryCtxRetain(&context_, device_));
}

CudaDevice::~CudaDevice() {
  if (driver_->cuCtxPushCurrent_v2(context_) == kSuccess) {
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
  driver_->cuDevicePrimaryCtxRelease_v2(device_);
}

bool CudaDevice::canAccessPeer(int other_ordinal) const {
  if (other_ordinal == ordinal_) return true;
  int count = 0;
  HDP_CUDA(*driver_, cuDeviceGetCount(&count));
  if (other_ordinal < 0 || other_ordinal >= count) return false;
  Ordinal other = 0;
  HDP_CUDA(*driver_, cuDeviceGet(&other, other_ordinal));
  int can = 0;
  HDP_CUDA(*driver_, cuDeviceCanAccessPeer(&can, device_, other));
  return can != 0;
}

void* CudaDevice::allocate(size_t bytes, Site) {
  device::checkAllocation(bytes);
  const Guard guard(*this);
  Pointer memory = 0;
  HDP_CUDA(*driver_, cuMemAlloc_v2(&memory, (bytes + kBlock - 1) / kBlock * kBlock));
  void* address = reinterpret_cast<void*>(memory);
  const std::lock_guard lock(allocations_mutex);
  allocations()[address] = {this, ordinal_};
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
  {
    const std::lock_guard lock(allocations_mutex);
    const auto found = allocations().find(memory);
    if (found == allocations().end() || found->second.owner != this) {
      device::throwNotExportable(memory);
    }
  }
  const Guard guard(*this);
  HandleContent content{kMagic, thisProcess(), ordinal_, pointer(memory), {}};
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
  // To learn its handle; the owner of the memory, a device of this process, keeps it alive.
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
      if (!allocations().contains(memory)) device::throwFreedExport();
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

Stream CudaDevice::createStream(int priority) {
  const Guard guard(*this);
  int lowest = 0;   // the largest number
  int highest = 0;  // the smallest
  HDP_CUDA(*driver_, cuCtxGetStreamPriorityRange(&lowest, &highest));
  DriverStream stream = nullptr;
  HDP_CUDA(*driver_, cuStreamCreateWithPriority(&stream, kStreamNonBlocking,
                                                std::clamp(priority, highest, lowest)));
  return {reinterpret_cast<uintptr_t>(stream)};
}

void CudaDevice::destroyStream(Stream stream) {
  if (stream == Stream{}) device::throwDefaultStream();
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuStreamDestroy_v2(raw(stream)));
}

Event CudaDevice::createEvent() {
  const Guard guard(*this);
  DriverEvent event = nullptr;
  HDP_CUDA(*driver_, cuEventCreate(&event, kEventDisableTiming));
  return {reinterpret_cast<uintptr_t>(event)};
}

void CudaDevice::destroyEvent(Event event) {
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuEventDestroy_v2(raw(event)));
}

void CudaDevice::record(Event event, Stream stream, Site) {
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuEventRecord(raw(event), raw(stream)));
}

void CudaDevice::wait(Stream stream, Event event, Site) {
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuStreamWaitEvent(raw(stream), raw(event), 0));
}

bool CudaDevice::query(Event event) {
  const Guard guard(*this);
  const Result result = driver_->cuEventQuery(raw(event));
  if (result == kNotReady) return false;
  driver_->check(result, "cuEventQuery(event)", __FILE__, __LINE__);
  return true;
}

// Polls, because the driver's own wait knows no deadline.
void CudaDevice::synchronize(Event event, double timeout_s, const InterruptCheck& check,
                             Site site) {
  device::checkTimeout(timeout_s);
  using std::chrono::steady_clock;
  const auto start = steady_clock::now();
  const std::chrono::duration<double> limit(std::min(timeout_s, 1e9));
  auto next_check = start + std::chrono::milliseconds(10);
  while (!query(event)) {
    const auto now = steady_clock::now();
    if (now - start > limit) {
      const char* slash = std::strrchr(site.file, '/');
      throw Error(ErrorKind::kTimeout, "device work did not end within " +
                                           std::to_string(timeout_s) + " s (synchronize at " +
                                           (slash == nullptr ? site.file : slash + 1) + ":" +
                                           std::to_string(site.line) + ", " + name_ +
                                           "): a stream may stand at a flag that nobody writes");
    }
    if (check && now >= next_check) {
      check();
      next_check = now + std::chrono::milliseconds(10);
    }
    if (now - start < std::chrono::milliseconds(1)) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

void CudaDevice::synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                             Site site) {
  device::checkTimeout(timeout_s);
  const Event event = createEvent();
  struct Destroy {
    CudaDevice& device;
    Event event;
    ~Destroy() {
      if (device.driver_->cuCtxPushCurrent_v2(device.context_) != kSuccess) return;
      Context context = nullptr;
      device.driver_->cuEventDestroy_v2(raw(event));
      device.driver_->cuCtxPopCurrent_v2(&context);
    }
  } destroy{*this, event};
  record(event, stream, site);
  synchronize(event, timeout_s, check, site);
}

bool CudaDevice::isCapturing(Stream stream) {
  const Guard guard(*this);
  int status = 0;
  HDP_CUDA(*driver_, cuStreamIsCapturing(raw(stream), &status));
  return status != 0;
}

void CudaDevice::copy(void* dst, const void* src, size_t bytes, Stream stream, Site) {
  device::checkCopy(dst, src, bytes);
  if (bytes == 0) return;
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuMemcpyAsync(pointer(dst), pointer(src), bytes, raw(stream)));
}

void CudaDevice::fill(void* dst, unsigned char value, size_t bytes, Stream stream, Site) {
  device::checkFill(dst, bytes);
  if (bytes == 0) return;
  const Guard guard(*this);
  HDP_CUDA(*driver_, cuMemsetD8Async(pointer(dst), value, bytes, raw(stream)));
}

void CudaDevice::writeValue(Stream stream, uint32_t* flag, uint32_t value, Site) {
  device::checkFlag("writeValue", flag);
  const Guard guard(*this);
  // Relaxed: whoever still sees true asks the driver again.
  if (memory_operations_.load(std::memory_order_relaxed)) {
    const Result result =
        driver_->cuStreamWriteValue32_v2(raw(stream), pointer(flag), value, kWriteDefault);
    if (result != kNotSupported) {
      return driver_->check(result, "cuStreamWriteValue32_v2(stream, flag, value, 0)", __FILE__,
                            __LINE__);
    }
    memory_operations_.store(false, std::memory_order_relaxed);
  }
  launchWriteValue(flag, value, raw(stream));
}

void CudaDevice::waitValue(Stream stream, uint32_t* flag, uint32_t value, Site) {
  device::checkFlag("waitValue", flag);
  const Guard guard(*this);
  if (memory_operations_.load(std::memory_order_relaxed)) {
    const Result result =
        driver_->cuStreamWaitValue32_v2(raw(stream), pointer(flag), value, kWaitGeq);
    if (result != kNotSupported) {
      return driver_->check(result, "cuStreamWaitValue32_v2(stream, flag, value, GEQ)", __FILE__,
                            __LINE__);
    }
    memory_operations_.store(false, std::memory_order_relaxed);
  }
  launchWaitValue(flag, value, raw(stream));
}

void CudaDevice::launch(KernelLaunch kernel, Stream stream, Site) {
  if (!kernel.cuda) {
    throwInvalidUsage(std::string("launch of ") + kernel.name + ": it has no CUDA kernel");
  }
  const Guard guard(*this);
  kernel.cuda(raw(stream));
}

void CudaDevice::storeFlag(uint32_t* flag, uint32_t value, Site) {
  device::checkFlag("storeFlag", flag);
  // Release: what this thread did is before the value; devices read pinned memory coherently.
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

uint32_t CudaDevice::loadFlag(const uint32_t* flag, Site) {
  device::checkFlag("loadFlag", flag);
  // Acquire: pairs with the fence of writeValue.
  return std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
}

std::shared_ptr<DeviceApi> openDevice(const char* library, int ordinal) {
  return std::make_shared<CudaDevice>(Driver::open(library), ordinal);
}

}  // namespace hdpcomm::cuda

namespace hdpcomm {

std::shared_ptr<DeviceApi> openCudaDevice(int ordinal) {
  return cuda::openDevice(cuda::kDriverLibrary, ordinal);
}

int cudaDeviceCount() noexcept {
  try {
    const auto driver = cuda::Driver::open(cuda::kDriverLibrary);
    int count = 0;
    return driver->cuDeviceGetCount(&count) == cuda::kSuccess ? count : 0;
  } catch (const Error&) {
    return 0;
  }
}

}  // namespace hdpcomm
