// SimDevice's fast mode: each stream has a thread, events are counts of finished operations.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "device/simulated/capture.hpp"
#include "device/simulated/fast_stream.hpp"
#include "device/simulated/stream_device.hpp"

namespace hdpcomm::sim {

class FastDevice final : public SimStreamDevice<std::shared_ptr<FastStream>, Point> {
 public:
  explicit FastDevice(int ordinal);
  ~FastDevice() override;

  std::string name() const override { return "sim"; }
  // For tests: only `count` more streams get a thread; starting another one fails.
  void limitThreads(int count) { state_->threads_left.store(count); }

  void* allocate(size_t bytes, Site) override {
    checkFault();
    return MemoryTable::get().allocate(bytes, this);
  }
  void free(void* memory, Site) override { MemoryTable::get().release(memory, this); }
  void* allocatePinned(size_t bytes, Site) override {
    checkFault();
    return MemoryTable::get().allocatePinned(bytes, this);
  }
  void freePinned(void* memory, Site) override { MemoryTable::get().releasePinned(memory, this); }

  Stream createStream(int priority) override;
  void destroyStream(Stream stream) override;
  void record(Event event, Stream stream, Site site) override;
  void wait(Stream stream, Event event, Site site) override;
  bool query(Event event) override;
  void synchronize(Event event, double timeout_s, const InterruptCheck& check, Site site) override;
  void synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                   Site site) override;

  bool isCapturing(Stream stream) override { return captureOf(stream) != 0; }
  // See sim_graph.hpp.
  void beginCapture(Stream stream);
  std::shared_ptr<SimGraph> endCapture(Stream stream);
  uint64_t captureOf(Stream stream);

  void storeFlag(uint32_t* flag, uint32_t value, Site site) override;
  uint32_t loadFlag(const uint32_t* flag, Site site) override;
  void annotateRead(const void*, size_t, Site) override {}
  void annotateWrite(void*, size_t, Site) override {}
  void annotateFree(const void*, size_t, Site) override {}
  void annotateRelease(uint64_t) override {}
  void annotateAcquire(uint64_t) override {}

 private:
  void checkFault() const override;
  void submit(Op op, Stream stream) override;
  std::shared_ptr<Capture> capturing(const FastStream* stream);
  void refuseCaptured(const char* call, Event event);
  void await(const Point& point, double timeout_s, const InterruptCheck& check, Site site);

  std::shared_ptr<DeviceState> state_ = std::make_shared<DeviceState>();
  // Destroyed streams whose threads may still run; under mutex_.
  std::vector<std::shared_ptr<FastStream>> retired_;
  std::map<const FastStream*, std::shared_ptr<Capture>> captures_;  // under mutex_, as below
  std::map<uintptr_t, Capture::Moment> captured_events_;            // last recorded in a capture
  uint64_t next_capture_ = 1;
  std::atomic<bool> has_captured_{false};  // whether any capture has ever begun
};

}  // namespace hdpcomm::sim
