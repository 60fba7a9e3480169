// CUDA graphs of a SimDevice in fast mode, for tests: what streams are given during a capture is
// kept, and runs each time the graph is launched.
//
// As with CUDA: a stream takes part from the moment at which it waits for an event that was
// recorded in the capture; it must not wait for one from outside; at the end every stream's work
// has to be joined to the first one's; events of a capture cannot be queried or synchronized with.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device_api.hpp"

namespace hdpcomm {

class SimGraph {
 public:
  virtual ~SimGraph() = default;
  // Behind what the stream holds, and before what it gets next. Launches follow each other.
  virtual void launch(Stream stream) = 0;
};

// Throw InvalidUsage for another device, or for what CUDA would refuse.
void beginSimCapture(DeviceApi& device, Stream stream);
std::shared_ptr<SimGraph> endSimCapture(DeviceApi& device, Stream stream);
// A number of the capture that the stream takes part in; 0: none, or no such device.
uint64_t simCaptureOf(DeviceApi& device, Stream stream);

}  // namespace hdpcomm
