#include "device/event_pool.hpp"

namespace hdpcomm {

OwnedEvent EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      OwnedEvent event = std::move(idle_.back());
      idle_.pop_back();
      return event;
    }
  }
  return OwnedEvent(device_, device_->createEvent());
}

void EventPool::give(OwnedEvent event) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(event));
}

Fence EventPool::record(Stream stream, Site site) {
  struct Held {
    std::shared_ptr<EventPool> pool;
    OwnedEvent event;
    Event value;
    ~Held() {
      if (event) pool->give(std::move(event));
    }
  };
  const auto held = std::make_shared<Held>();
  held->event = take();
  held->pool = shared_from_this();
  held->value = held->event.get();
  device_->record(held->value, stream, site);
  return Fence(held, &held->value);
}

}  // namespace hdpcomm
