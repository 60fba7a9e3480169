// Events that are used again: making one costs a driver call, and an operation or an offload
// records several.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/handles.hpp"

namespace hdpcomm {

// An event that was recorded. The last holder gives it back to its pool; a wait that was enqueued
// on it keeps its point (device_api.hpp), so that holding it longer is never needed.
using Fence = std::shared_ptr<const Event>;

// Thread-safe. Made by make_shared: its fences hold it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(DevicePtr device) : device_(std::move(device)) {}

  // Lent until give(); it may still bear an earlier record.
  OwnedEvent take();
  void give(OwnedEvent event);
  // The end of what the stream has been given.
  Fence record(Stream stream, Site site = std::source_location::current());

 private:
  DevicePtr device_;
  std::mutex mutex_;
  std::vector<OwnedEvent> idle_;
};

}  // namespace hdpcomm
