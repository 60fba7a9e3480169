// Bounds how far the host runs ahead of a stream.
//
// A driver holds some 1,020 operations of a stream (measured: H100, driver 580). The call that
// enqueues one more blocks its thread and keeps a lock of the context: no other thread can enqueue
// anything then, neither another rank of the process, whose work this stream may wait for, nor the
// engine, which releases the streams when a peer has died. So the host waits here before that, and
// hears of errors and of the deadline meanwhile.
#pragma once

#include <cstddef>
#include <deque>

#include "device/handles.hpp"

namespace hdpcomm::device {

class Pacer {
 public:
  using WaitCheck = DeviceApi::InterruptCheck;

  explicit Pacer(DevicePtr device) : device_(std::move(device)) {}

  // Call before up to `operations` are enqueued on the stream, which is always the same one. Waits
  // while it holds too many; `check` is called meanwhile, and throws to give up. Never waits for
  // operations of the same call, nor while the stream is captured.
  void pass(Stream stream, size_t operations, const WaitCheck& check);

 private:
  struct Mark {
    OwnedEvent event;
    size_t operations;  // between the mark before and this one
  };
  static constexpr size_t kEvery = 64;  // operations between marks
  static constexpr size_t kRoom = 512;  // operations; half of what a driver holds: streams share it

  DevicePtr device_;
  std::deque<Mark> marks_;
  size_t marked_ = 0;    // operations before the last mark that may not have ended
  size_t unmarked_ = 0;  // operations since
};

}  // namespace hdpcomm::device
