// SimDevice's fast mode.
#include "device/simulated/fast_device.hpp"

#include <chrono>
#include <vector>

namespace hdpcomm::sim {

FastDevice::FastDevice(int ordinal) : SimStreamDevice(ordinal) {
  streams_.emplace(0, std::make_shared<FastStream>(state_));
}

FastDevice::~FastDevice() {
  state_->stop.store(true);
  for (auto& [handle, stream] : streams_) retired_.push_back(stream);
  for (const auto& stream : retired_) stream->close();
  for (const auto& stream : retired_) stream->join();
  MemoryTable::get().releaseAll(this);
}

void FastDevice::checkFault() const {
  if (!state_->faulty.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(state_->mutex);
  throw *state_->fault;
}

Stream FastDevice::createStream(int) {
  checkFault();
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(retired_, [](const auto& stream) {
      if (!stream->threadEnded()) return false;
      stream->join();
      return true;
    });
  }
  return add(std::make_shared<FastStream>(state_));
}

void FastDevice::destroyStream(Stream stream) {
  const auto state = remove(stream);
  const std::lock_guard lock(mutex_);
  state->close();
  retired_.push_back(state);
}

std::shared_ptr<Capture> FastDevice::capturing(const FastStream* stream) {
  // Relaxed: the caller has to order the begin of a capture before other calls on its streams.
  if (!has_captured_.load(std::memory_order_relaxed)) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = captures_.find(stream);
  return found != captures_.end() ? found->second : nullptr;
}

void FastDevice::record(Event event, Stream stream, Site) {
  checkFault();
  find(event);
  const auto state = find(stream);
  if (const auto capture = capturing(state.get())) {
    const std::lock_guard lock(mutex_);
    captured_events_[event.handle] = capture->moment(state.get());
    return;
  }
  mark(event, Point{state, state->submitted()});
  if (!has_captured_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  captured_events_.erase(event.handle);
}

void FastDevice::wait(Stream stream, Event event, Site site) {
  checkFault();
  Point point = find(event);
  const auto state = find(stream);
  if (has_captured_.load(std::memory_order_relaxed)) {
    const std::lock_guard lock(mutex_);
    const auto own = captures_.find(state.get());
    const auto moment = captured_events_.find(event.handle);
    const bool inside = moment != captured_events_.end();
    if (own != captures_.end() && (!inside || moment->second.capture != own->second)) {
      throwInvalidUsage("wait() in a capture got an event that was recorded outside of it");
    }
    if (inside) {
      const std::shared_ptr<Capture> capture = moment->second.capture;
      if (capture->ended()) {
        throwInvalidUsage("wait() got an event of a capture that has ended");
      }
      capture->wait(state.get(), moment->second, site);
      captures_[state.get()] = capture;
      return;
    }
  }
  if (point.done() || point.stream == state) return;
  Op op;
  op.kind = OpKind::kWaitEvent;
  op.site = site;
  state->submit({std::move(op), std::move(point)});
}

void FastDevice::refuseCaptured(const char* call, Event event) {
  if (!has_captured_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  if (captured_events_.count(event.handle) == 0) return;
  throwInvalidUsage(std::string(call) + " got an event that was recorded in a capture");
}

bool FastDevice::query(Event event) {
  checkFault();
  refuseCaptured("query()", event);
  return find(event).done();
}

void FastDevice::synchronize(Event event, double timeout_s, const InterruptCheck& check,
                             Site site) {
  checkTimeout(timeout_s);
  refuseCaptured("synchronize()", event);
  await(find(event), timeout_s, check, site);
}

void FastDevice::synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                             Site site) {
  checkTimeout(timeout_s);
  const auto state = find(stream);
  if (capturing(state.get()) != nullptr) {
    throwInvalidUsage("synchronize() got a stream that is being captured");
  }
  await(Point{state, state->submitted()}, timeout_s, check, site);
}

void FastDevice::await(const Point& point, double timeout_s, const InterruptCheck& check,
                       Site site) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(timeout_s, 1e9));
  if (point.stream != nullptr) {
    const bool done = point.stream->waitCompleted(point.ticket, [&] {
      if (check) check();
      return std::chrono::steady_clock::now() < deadline;
    });
    if (!done) {
      throw Error(ErrorKind::kTimeout, "device work did not end within " +
                                           std::to_string(timeout_s) + " s (synchronize at " +
                                           placeOf(site) + "): " + point.stream->progressText());
    }
  }
  checkFault();
}

void FastDevice::submit(Op op, Stream stream) {
  checkFault();
  const auto state = find(stream);
  if (const auto capture = capturing(state.get())) {
    const std::lock_guard lock(mutex_);
    capture->add(state.get(), std::move(op));
    return;
  }
  state->submit({std::move(op), {}});
}

uint64_t FastDevice::captureOf(Stream stream) {
  const auto capture = capturing(find(stream).get());
  return capture != nullptr ? capture->number() : 0;
}

void FastDevice::beginCapture(Stream stream) {
  const auto state = find(stream);
  if (stream == Stream{} || capturing(state.get()) != nullptr) {
    throwInvalidUsage("a capture begins on a stream that is not the default one, nor captured");
  }
  has_captured_.store(true, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  auto capture = std::make_shared<Capture>(next_capture_++, state.get(), state_);
  capture->setFind([this](Stream each) { return find(each); });
  captures_[state.get()] = std::move(capture);
}

std::shared_ptr<SimGraph> FastDevice::endCapture(Stream stream) {
  const auto state = find(stream);
  const auto capture = capturing(state.get());
  if (capture == nullptr || !capture->isOrigin(state.get())) {
    throwInvalidUsage("the end of a capture is on the stream on which it began");
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(captures_, [&](const auto& each) { return each.second == capture; });
  capture->end();
  return capture;
}

void FastDevice::storeFlag(uint32_t* flag, uint32_t value, Site) {
  checkFlag("storeFlag", flag);
  storeWord(flag, value);
}

uint32_t FastDevice::loadFlag(const uint32_t* flag, Site) {
  checkFlag("loadFlag", flag);
  return loadWord(flag);
}

}  // namespace hdpcomm::sim
