// A CUDA device, through the driver API.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device/cuda/driver.hpp"

namespace hdpcomm::cuda {

// Memory is shared between processes by legacy IPC handles: 64 plain bytes that any process of the
// host can open, also on the same GPU, and that need nothing passed beside them (a VMM handle is a
// descriptor, which needs a socket or pidfd_getfd). The driver cannot open a handle in the process
// that made it; there the address itself is used.
class CudaDevice final : public DeviceApi {
 public:
  CudaDevice(std::shared_ptr<const Driver> driver, int ordinal);
  ~CudaDevice() override;

  std::string name() const override { return name_; }
  bool isSim() const override { return false; }
  int ordinal() const override { return ordinal_; }
  std::string identity() const override;
  bool runsProcessesTogether() const override;
  bool canAccessPeer(int other_ordinal) const override;

  void* allocate(size_t bytes, Site) override;
  void free(void* memory, Site) override;
  void* allocatePinned(size_t bytes, Site) override;
  void freePinned(void* memory, Site) override;
  void registerPinned(void* memory, size_t bytes) override;
  void unregisterPinned(void* memory) override;
  MemoryHandle exportMemory(void* memory) override;
  void* importMemory(const MemoryHandle& handle) override;
  void closeMemory(void* memory) override;

  Stream createStream(int priority) override;
  void destroyStream(Stream stream) override;
  Event createEvent() override;
  void destroyEvent(Event event) override;
  void record(Event event, Stream stream, Site) override;
  void wait(Stream stream, Event event, Site) override;
  bool query(Event event) override;
  void synchronize(Event event, double timeout_s, const InterruptCheck& check, Site site) override;
  void synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                   Site site) override;
  bool isCapturing(Stream stream) override;

  void copy(void* dst, const void* src, size_t bytes, Stream stream, Site) override;
  void fill(void* dst, unsigned char value, size_t bytes, Stream stream, Site) override;
  void writeValue(Stream stream, uint32_t* flag, uint32_t value, Site) override;
  void waitValue(Stream stream, uint32_t* flag, uint32_t value, Site) override;
  void flagOps(Stream stream, std::span<const FlagOp> ops) override;
  void launch(KernelLaunch kernel, Stream stream, Site) override;
  void loadKernels() override;

  void storeFlag(uint32_t* flag, uint32_t value, Site) override;

 private:
  class Guard;  // makes the context current, and restores the previous one
  struct Import {
    std::string key;  // the handle's bytes
    bool opened = false;
    size_t uses = 0;
  };

  void enablePeer(int other_ordinal);
  void releaseMemory() noexcept;  // frees what the owner did not free

  std::shared_ptr<const Driver> driver_;
  int ordinal_;
  std::string name_;
  Ordinal device_ = 0;
  Context context_ = nullptr;
  std::atomic<bool> memory_operations_{true};  // false once the driver has refused one
  std::mutex mutex_;                           // guards imports_ and pinned_
  std::map<void*, Import> imports_;
  std::map<void*, size_t> pinned_;
};

inline Pointer pointer(const void* memory) { return reinterpret_cast<Pointer>(memory); }

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

}  // namespace hdpcomm::cuda
