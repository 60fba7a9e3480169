// How far a stream had come, for work of other streams that has to follow.
#pragma once

#include <memory>

#include "device/event_pool.hpp"

namespace hdpcomm::device {

// The end of what a stream held. Work that was captured into a graph and work that was not are kept
// in order by whoever replays the graph (docs/stream-transport.md).
struct Mark {
  Fence end;
  Stream stream;
  bool captured;
};
using MarkPtr = std::shared_ptr<const Mark>;

// Whether the marked work is not known to come before work that the stream is given now. Forgets a
// mark that has been reached.
inline bool pending(DeviceApi& device, MarkPtr& mark, Stream stream, bool captured) {
  if (mark == nullptr || mark->stream == stream || mark->captured != captured) return false;
  if (captured) return device.isCapturing(mark->stream);
  if (!device.query(*mark->end)) return true;
  mark.reset();
  return false;
}

// Work of `stream` from now on comes after the marked work.
inline void follow(DeviceApi& device, MarkPtr& mark, Stream stream, bool captured) {
  if (pending(device, mark, stream, captured)) device.wait(stream, *mark->end);
}

}  // namespace hdpcomm::device
