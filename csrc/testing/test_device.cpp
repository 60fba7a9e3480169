#include "testing/test_device.hpp"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <random>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "device/simulated/wait.hpp"

namespace hdpcomm::testing {
namespace {

std::atomic<uint32_t> pause_seed{0};
std::atomic<uint32_t> most_pause_us{0};

// Nothing in three of four calls; else up to most_pause_us, more often short than long.
void pauseMaybe() {
  thread_local std::minstd_rand random(pause_seed.fetch_add(7919) + 1);
  const uint32_t drawn = random();
  if (drawn % 4 != 0) return;
  const double share = static_cast<double>(random()) / std::minstd_rand::max();
  std::this_thread::sleep_for(
      std::chrono::duration<double, std::micro>(share * share * most_pause_us.load()));
}

KernelLaunch pauseKernel() {
  KernelLaunch kernel;
  kernel.name = "pause";
  kernel.cpu = pauseMaybe;
  return kernel;
}

}  // namespace

void TestDevice::pauseAtRandom(uint32_t seed, uint32_t most_us) {
  pause_seed = seed;
  most_pause_us = most_us;
}

void TestDevice::countCalls() {
  const std::lock_guard lock(captures_mutex_);
  calls_.emplace();
}

std::map<std::string, int> TestDevice::countedCalls() {
  const std::lock_guard lock(captures_mutex_);
  return std::exchange(calls_, std::nullopt).value_or(std::map<std::string, int>{});
}

void TestDevice::count(const char* call) {
  const std::lock_guard lock(captures_mutex_);
  if (calls_ && within_ != std::this_thread::get_id()) ++(*calls_)[call];
}

void TestDevice::flagOps(Stream stream, std::span<const FlagOp> ops) {
  count("flagOps");
  {
    const std::lock_guard lock(captures_mutex_);
    within_ = std::this_thread::get_id();
  }
  FastDevice::flagOps(stream, ops);
  const std::lock_guard lock(captures_mutex_);
  within_.reset();
}

void TestDevice::launchParts(std::vector<KernelLaunch> parts, Stream stream, Site site) {
  count("launch");
  {
    const std::lock_guard lock(captures_mutex_);
    within_ = std::this_thread::get_id();
  }
  FastDevice::launchParts(std::move(parts), stream, site);
  const std::lock_guard lock(captures_mutex_);
  within_.reset();
}

Stream TestDevice::createStream(int priority) {
  count("createStream");
  if (num_queues_ == 0) return FastDevice::createStream(priority);
  if (queues_.empty()) queues_.push_back(find(Stream{}));
  while (static_cast<int>(queues_.size()) < num_queues_) {
    queues_.push_back(std::make_shared<FastStream>(state_));
  }
  return add(queues_[next_queue_++ % queues_.size()]);
}

void TestDevice::destroyStream(Stream stream) {
  if (num_queues_ == 0) return FastDevice::destroyStream(stream);
  remove(stream);  // others may be in its queue
}

std::shared_ptr<Capture> TestDevice::capturing(const FastStream* stream) {
  const std::lock_guard lock(captures_mutex_);
  const auto found = captures_.find(stream);
  return found != captures_.end() ? found->second : nullptr;
}

uint64_t TestDevice::captureOf(Stream stream) {
  const auto capture = capturing(find(stream).get());
  return capture != nullptr ? capture->number() : 0;
}

void TestDevice::beginCapture(Stream stream) {
  const auto state = find(stream);
  if (stream == Stream{} || capturing(state.get()) != nullptr) {
    throwInvalidUsage("a capture begins on a stream that is not the default one, nor captured");
  }
  const std::lock_guard lock(captures_mutex_);
  auto capture = std::make_shared<Capture>(next_capture_++, state.get(), state_);
  capture->setFind([this](Stream each) { return find(each); });
  captures_[state.get()] = std::move(capture);
}

std::shared_ptr<Capture> TestDevice::endCapture(Stream stream) {
  const auto state = find(stream);
  const auto capture = capturing(state.get());
  if (capture == nullptr || !capture->isOrigin(state.get())) {
    throwInvalidUsage("the end of a capture is on the stream on which it began");
  }
  const std::lock_guard lock(captures_mutex_);
  std::erase_if(captures_, [&](const auto& each) { return each.second == capture; });
  capture->end();
  return capture;
}

void TestDevice::record(Event event, Stream stream, Site site) {
  count("record");
  const auto state = find(stream);
  if (const auto capture = capturing(state.get())) {
    find(event);  // throws where there is no such event
    const std::lock_guard lock(captures_mutex_);
    captured_events_[event.handle] = capture->moment(state.get());
    return;
  }
  FastDevice::record(event, stream, site);
  const std::lock_guard lock(captures_mutex_);
  captured_events_.erase(event.handle);
}

void TestDevice::wait(Stream stream, Event event, Site site) {
  count("wait");
  const auto state = find(stream);
  {
    const std::lock_guard lock(captures_mutex_);
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
  FastDevice::wait(stream, event, site);
}

void TestDevice::refuseCaptured(const char* call, Event event) {
  const std::lock_guard lock(captures_mutex_);
  if (captured_events_.count(event.handle) == 0) return;
  throwInvalidUsage(std::string(call) + " got an event that was recorded in a capture");
}

bool TestDevice::query(Event event) {
  count("query");
  refuseCaptured("query()", event);
  return FastDevice::query(event);
}

void TestDevice::synchronize(Event event, double timeout_s, const InterruptCheck& check,
                             Site site) {
  refuseCaptured("synchronize()", event);
  FastDevice::synchronize(event, timeout_s, check, site);
}

void TestDevice::synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                             Site site) {
  if (isCapturing(stream)) {
    throwInvalidUsage("synchronize() got a stream that is being captured");
  }
  FastDevice::synchronize(stream, timeout_s, check, site);
}

void TestDevice::limitThreads(int count) {
  const std::lock_guard lock(captures_mutex_);
  threads_left_ = count;
}

void TestDevice::limitQueues(uint64_t operations, bool blocks) {
  const std::lock_guard lock(captures_mutex_);
  most_queued_ = operations;
  blocks_ = blocks;
}

void TestDevice::holdCopies(uint32_t* flag) {
  const std::lock_guard lock(captures_mutex_);
  copies_wait_for_ = flag;
}

void TestDevice::submit(Op op, Stream stream) {
  count(op.kind == simulated::OpKind::kCopy     ? "copy"
        : op.kind == simulated::OpKind::kKernel ? "launch"
                                                : "flag");
  const auto state = find(stream);
  if (const auto capture = capturing(state.get())) {
    const std::lock_guard lock(captures_mutex_);
    capture->add(state.get(), std::move(op));
    return;
  }
  const auto held_now = [&] { return state->submitted() - state->completed(); };
  if (blocks_) {
    const std::lock_guard driver(driver_mutex_);
    while (held_now() >= *most_queued_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } else {
    const uint64_t held = held_now();
    const std::lock_guard lock(captures_mutex_);
    if (most_queued_ && held >= *most_queued_) {
      throw Error(ErrorKind::kDevice, "a stream holds " + std::to_string(held) +
                                          " operations: a driver would block the host here");
    }
  }
  if (op.kind == simulated::OpKind::kWaitValue) {
    const std::lock_guard lock(captures_mutex_);
    if (threads_left_ && streams_with_threads_.insert(stream.handle).second &&
        --*threads_left_ < 0) {
      throw std::system_error(EAGAIN, std::generic_category(), "no thread for a stream");
    }
  }
  if (op.kind == simulated::OpKind::kCopy || op.kind == simulated::OpKind::kKernel) {
    const std::lock_guard lock(captures_mutex_);
    if (copies_wait_for_ != nullptr) {
      FastDevice::submit(Op::wait(copies_wait_for_, 1, op.site), stream);
    }
  }
  if (most_pause_us == 0) return FastDevice::submit(std::move(op), stream);
  pauseMaybe();
  FastDevice::submit(Op::launch(pauseKernel(), op.site), stream);
  FastDevice::submit(std::move(op), stream);
  FastDevice::submit(Op::launch(pauseKernel(), {}), stream);
}

}  // namespace hdpcomm::testing
