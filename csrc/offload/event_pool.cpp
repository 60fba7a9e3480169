#include "hdpcomm/offload/event_pool.hpp"

namespace hdpcomm::offload {

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

Fence EventPool::record(Stream stream, Site site) {
  struct Held {
    std::shared_ptr<EventPool> pool;
    OwnedEvent event;
    Event value;
    ~Held() {
      if (!event) return;
      const std::lock_guard lock(pool->mutex_);
      pool->idle_.push_back(std::move(event));
    }
  };
  const auto held = std::make_shared<Held>();
  held->event = take();
  held->pool = shared_from_this();
  held->value = held->event.get();
  device_->record(held->value, stream, site);
  return Fence(held, &held->value);
}

}  // namespace hdpcomm::offload
