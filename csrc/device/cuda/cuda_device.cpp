#include "device/cuda/cuda_device.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

#include "base/error.hpp"
#include "device/arguments.hpp"
#include "device/cuda/loading.hpp"
#include "device/devices.hpp"

namespace hdpcomm::cuda {
namespace {

DriverStream raw(Stream stream) { return reinterpret_cast<DriverStream>(stream.handle); }
DriverEvent raw(Event event) { return reinterpret_cast<DriverEvent>(event.handle); }

}  // namespace

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
  releaseMemory();
  driver_->cuDevicePrimaryCtxRelease_v2(device_);
}

std::string CudaDevice::identity() const {
  char text[32] = {};
  HDP_CUDA(*driver_, cuDeviceGetPCIBusId(text, sizeof text - 1, device_));
  return text;
}

// By the Multi-Process Service, whose control program has this pipe.
bool CudaDevice::runsProcessesTogether() const {
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  std::error_code ignored;
  return std::filesystem::exists(
      std::filesystem::path(folder != nullptr ? folder : "/tmp/nvidia-mps") / "control", ignored);
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

// Polls, because the driver's own wait has no deadline.
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
                                           "): a stream may wait for a flag that nobody writes");
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
  // Relaxed: a thread that still sees true just asks the driver again.
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

void CudaDevice::flagOps(Stream stream, std::span<const FlagOp> ops) {
  // Relaxed: as in writeValue.
  if (memory_operations_.load(std::memory_order_relaxed)) {
    std::array<MemOp, 256> batch;  // the driver takes no more
    size_t count = 0;
    const Guard guard(*this);
    for (size_t i = 0; i < ops.size(); ++i) {
      const FlagOp& op = ops[i];
      device::checkFlag(op.waits ? "waitValue" : "writeValue", op.target.flag);
      batch[count++] = {op.waits ? kMemOpWait32 : kMemOpWrite32,
                        pointer(op.target.flag),
                        op.target.value,
                        op.waits ? kWaitGeq : kWriteDefault,
                        0,
                        0};
      if (count < batch.size() && i + 1 < ops.size()) continue;
      const Result result = driver_->cuStreamBatchMemOp_v2(
          raw(stream), static_cast<unsigned>(count), batch.data(), 0);
      if (result == kNotSupported) {
        return DeviceApi::flagOps(stream, ops.subspan(i + 1 - count));
      }
      driver_->check(result, "cuStreamBatchMemOp_v2(stream, count, operations, 0)", __FILE__,
                     __LINE__);
      count = 0;
    }
    return;
  }
  DeviceApi::flagOps(stream, ops);
}

void CudaDevice::launch(KernelLaunch kernel, Stream stream, Site) {
  if (!kernel.cuda) {
    throwInvalidUsage(std::string("launch of ") + kernel.name + ": it has no CUDA kernel");
  }
  const Guard guard(*this);
  kernel.cuda(raw(stream));
}

void CudaDevice::loadKernels() {
  const Guard guard(*this);
  cuda::loadKernels();
}

void CudaDevice::storeFlag(uint32_t* flag, uint32_t value, Site) {
  device::checkFlag("storeFlag", flag);
  // Release: what this thread did is before the value; devices read pinned memory coherently.
  std::atomic_ref<uint32_t>(*flag).store(value, std::memory_order_release);
}

std::shared_ptr<DeviceApi> openDevice(const char* library, int ordinal) {
  return std::make_shared<CudaDevice>(Driver::open(library), ordinal);
}

}  // namespace hdpcomm::cuda

namespace hdpcomm {

std::shared_ptr<DeviceApi> openCudaDevice(int ordinal) {
  return cuda::openDevice(cuda::kDriverLibrary, ordinal);
}

}  // namespace hdpcomm
