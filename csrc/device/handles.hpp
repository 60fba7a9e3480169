// RAII for the handles of a DeviceApi. Move-only; the destructor frees, never waits for streams and
// never throws, so the owner has to make sure that the work is done (device_api.hpp).
#pragma once

#include <memory>
#include <utility>

#include "device/device_api.hpp"

namespace hdpcomm {

using DevicePtr = std::shared_ptr<DeviceApi>;

// `Release(device, value)` frees a value; a default-constructed handle owns nothing.
template <typename Value, void (*Release)(DeviceApi&, Value)>
class DeviceHandle {
 public:
  DeviceHandle() = default;
  DeviceHandle(DevicePtr device, Value value) : device_(std::move(device)), value_(value) {}
  DeviceHandle(DeviceHandle&& other) noexcept
      : device_(std::move(other.device_)), value_(std::exchange(other.value_, Value{})) {}
  DeviceHandle& operator=(DeviceHandle&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(value_, other.value_);
    return *this;
  }
  ~DeviceHandle() {
    if (device_ == nullptr) return;
    try {
      Release(*device_, value_);
    } catch (...) {  // the device reports its fault on the next call that may throw
    }
  }
  Value get() const noexcept { return value_; }
  explicit operator bool() const noexcept { return device_ != nullptr; }

 private:
  DevicePtr device_;
  Value value_{};
};

namespace detail {
inline void releaseStream(DeviceApi& device, Stream stream) { device.destroyStream(stream); }
inline void releaseEvent(DeviceApi& device, Event event) { device.destroyEvent(event); }
inline void releaseMemory(DeviceApi& device, void* memory) { device.free(memory); }
inline void releasePinned(DeviceApi& device, void* memory) { device.freePinned(memory); }
inline void releaseImported(DeviceApi& device, void* memory) { device.closeMemory(memory); }
}  // namespace detail

using OwnedStream = DeviceHandle<Stream, detail::releaseStream>;
using OwnedEvent = DeviceHandle<Event, detail::releaseEvent>;
using DeviceMemory = DeviceHandle<void*, detail::releaseMemory>;
using PinnedMemory = DeviceHandle<void*, detail::releasePinned>;
using ImportedMemory = DeviceHandle<void*, detail::releaseImported>;

}  // namespace hdpcomm
