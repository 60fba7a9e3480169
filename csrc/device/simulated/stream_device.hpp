// Streams and events of a SimDevice, the same in both modes.
#pragma once

#include <map>
#include <mutex>

#include "device/simulated/memory_device.hpp"
#include "device/simulated/op.hpp"

namespace hdpcomm::simulated {

// `StreamState` is what a stream's handle maps to, `Mark` the last record of an event; a
// default-constructed one means never recorded.
template <typename StreamState, typename Mark>
class StreamDevice : public MemoryDevice {
 public:
  Event createEvent() override {
    checkFault();
    const std::lock_guard lock(mutex_);
    const Event event{newHandle()};
    events_.emplace(event.handle, Mark{});
    return event;
  }

  void destroyEvent(Event event) override {
    find(event);
    const std::lock_guard lock(mutex_);
    events_.erase(event.handle);
  }

  void copy(void* dst, const void* src, size_t bytes, Stream stream, Site site) override {
    submit(Op::copy(dst, src, bytes, site), stream);
  }
  void fill(void* dst, unsigned char value, size_t bytes, Stream stream, Site site) override {
    submit(Op::fill(dst, value, bytes, site), stream);
  }
  void writeValue(Stream stream, uint32_t* flag, uint32_t value, Site site) override {
    submit(Op::write(flag, value, site), stream);
  }
  void waitValue(Stream stream, uint32_t* flag, uint32_t value, Site site) override {
    submit(Op::wait(flag, value, site), stream);
  }
  void launch(KernelLaunch kernel, Stream stream, Site site) override {
    submit(Op::launch(std::move(kernel), site), stream);
  }

 protected:
  explicit StreamDevice(int ordinal) : MemoryDevice(ordinal) {}

  // Throws the fault that the device has reported, if any.
  virtual void checkFault() const {}
  virtual void submit(Op op, Stream stream) = 0;

  StreamState find(Stream stream) const {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream.handle);
    if (found == streams_.end()) throwUnknown("stream", stream.handle);
    return found->second;
  }

  Mark find(Event event) const {
    const std::lock_guard lock(mutex_);
    const auto found = events_.find(event.handle);
    if (found == events_.end()) throwUnknown("event", event.handle);
    return found->second;
  }

  Stream add(StreamState state) {
    const std::lock_guard lock(mutex_);
    const Stream stream{newHandle()};
    streams_.emplace(stream.handle, std::move(state));
    return stream;
  }

  // Removes the stream and returns its state.
  StreamState remove(Stream stream) {
    if (stream == Stream{}) throwDefaultStream();
    StreamState state = find(stream);
    const std::lock_guard lock(mutex_);
    streams_.erase(stream.handle);
    return state;
  }

  void mark(Event event, Mark point) {
    const std::lock_guard lock(mutex_);
    events_[event.handle] = std::move(point);
  }

  mutable std::mutex mutex_;  // guards streams_ and events_
  std::map<uintptr_t, StreamState> streams_;
  std::map<uintptr_t, Mark> events_;
};

}  // namespace hdpcomm::simulated
