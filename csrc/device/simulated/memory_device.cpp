#include "device/simulated/memory_device.hpp"

#include <atomic>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::simulated {

uintptr_t newHandle() {
  static std::atomic<uintptr_t> next{0x1000};
  // Relaxed: the numbers only have to differ. All devices share them, so that a handle of another
  // device is recognised.
  return next.fetch_add(1, std::memory_order_relaxed);
}

void throwUnknown(const char* what, uintptr_t handle) {
  throwInvalidUsage(std::string("this device has no ") + what + " " + std::to_string(handle) +
                    ": it was destroyed, or belongs to another device");
}

MemoryDevice::MemoryDevice(int ordinal) : ordinal_(ordinal) {
  if (ordinal < 0) {
    throwInvalidUsage("a device's number is 0 or more, not " + std::to_string(ordinal));
  }
}

}  // namespace hdpcomm::simulated
