// Reuses events: creating one costs a driver call, and each operation or offload records several.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/handles.hpp"

namespace hdpcomm {

// A recorded event. Dropping the last reference returns it to its pool; waits that are already
// enqueued on it keep their point (device_api.hpp), so it need not be held for them.
using Fence = std::shared_ptr<const Event>;

// Thread-safe. Create with make_shared: its fences keep a reference.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(DevicePtr device) : device_(std::move(device)) {}

  // Lends an event until give(); it may still hold an earlier record.
  OwnedEvent take();
  void give(OwnedEvent event);
  // Records a fence behind all work submitted to the stream so far.
  Fence record(Stream stream, Site site = std::source_location::current());

 private:
  DevicePtr device_;
  std::mutex mutex_;
  std::vector<OwnedEvent> idle_;
};

}  // namespace hdpcomm
