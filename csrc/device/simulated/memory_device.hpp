// Memory of a SimDevice, the same in both modes.
#pragma once

#include <algorithm>
#include <vector>

#include "device/device_api.hpp"
#include "device/simulated/memory.hpp"

namespace hdpcomm::simulated {

uintptr_t newHandle();
[[noreturn]] void throwUnknown(const char* what, uintptr_t handle);

class MemoryDevice : public DeviceApi {
 public:
  explicit MemoryDevice(int ordinal);

  bool isSim() const override { return true; }
  int ordinal() const override { return ordinal_; }
  bool canAccessPeer(int other) const override {
    return std::find(out_of_reach_.begin(), out_of_reach_.end(), other) == out_of_reach_.end();
  }
  // Call before the device is shared.
  void setUnreachable(std::vector<int> others) { out_of_reach_ = std::move(others); }
  bool isCapturing(Stream) override { return false; }

  void registerPinned(void* memory, size_t bytes) override {
    MemoryTable::get().registerPinned(memory, bytes);
  }
  void unregisterPinned(void* memory) override { MemoryTable::get().unregisterPinned(memory); }
  MemoryHandle exportMemory(void* memory) override {
    return MemoryTable::get().exportMemory(memory, this);
  }
  void* importMemory(const MemoryHandle& handle) override {
    return MemoryTable::get().importMemory(handle, this);
  }
  void closeMemory(void* memory) override { MemoryTable::get().closeMemory(memory, this); }

 private:
  int ordinal_;
  std::vector<int> out_of_reach_;
};

}  // namespace hdpcomm::simulated
