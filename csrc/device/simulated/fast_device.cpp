#include "device/simulated/fast_device.hpp"

#include <chrono>
#include <vector>

#include "device/devices.hpp"

namespace hdpcomm {
namespace simulated {

std::atomic<std::shared_ptr<MemoryDevice> (*)(int)> open_checked{nullptr};

FastDevice::FastDevice(int ordinal) : StreamDevice(ordinal) {
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

void FastDevice::record(Event event, Stream stream, Site) {
  checkFault();
  find(event);
  const auto state = find(stream);
  mark(event, Point{state, state->submitted()});
}

void FastDevice::wait(Stream stream, Event event, Site site) {
  checkFault();
  Point point = find(event);
  const auto state = find(stream);
  if (point.done() || point.stream == state) return;
  Op op;
  op.kind = OpKind::kWaitEvent;
  op.site = site;
  state->submit({std::move(op), std::move(point)});
}

// A fault is told when the work is through: an operation that runs while the device fails still
// uses its memory.
bool FastDevice::query(Event event) {
  const bool done = find(event).done();
  if (done) checkFault();
  return done;
}

void FastDevice::synchronize(Event event, double timeout_s, const InterruptCheck& check,
                             Site site) {
  checkTimeout(timeout_s);
  await(find(event), timeout_s, check, site);
}

void FastDevice::synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                             Site site) {
  checkTimeout(timeout_s);
  const auto state = find(stream);
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
  find(stream)->submit({std::move(op), {}});
}

void FastDevice::storeFlag(uint32_t* flag, uint32_t value, Site) {
  checkFlag("storeFlag", flag);
  storeWord(flag, value);
}

}  // namespace simulated

std::shared_ptr<DeviceApi> openSimDevice(int ordinal) {
  using namespace simulated;
  const auto open = open_checked.load();
  std::shared_ptr<MemoryDevice> device = open != nullptr ? open(ordinal) : nullptr;
  if (device == nullptr) device = std::make_shared<FastDevice>(ordinal);
  return device;
}

}  // namespace hdpcomm
