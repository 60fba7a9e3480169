// A simulated device in fast mode with what only tests ask of one: captures into graphs, a host
// that runs out of threads, and streams that hold no more operations than those of a driver.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/simulated/fast_device.hpp"
#include "testing/capture.hpp"

namespace hdpcomm::testing {

class TestDevice final : public simulated::FastDevice {
 public:
  using FastDevice::FastDevice;

  // Throw InvalidUsage for what CUDA would refuse.
  void beginCapture(Stream stream);
  std::shared_ptr<Capture> endCapture(Stream stream);
  // A number of the capture that the stream takes part in; 0: none.
  uint64_t captureOf(Stream stream);

  // From now on only `count` streams that have to wait get a thread; for the others the system has
  // none left, which is an error of the call.
  void limitThreads(int count);
  // From now on a stream that holds `operations` takes no more: an error of the call, where a
  // driver would block the host; with `blocks` it does, and all other calls that enqueue.
  void limitQueues(uint64_t operations, bool blocks);
  // Streams that are made from now on share so many queues in turn, the default stream's among
  // them: what a queue was given first runs first. Streams of a GPU share them, too.
  void shareQueues(int count) { num_queues_ = count; }
  // Streams of all these devices pause at random from now on, at submissions and before and after
  // each operation, by up to most_us; 0 ends it.
  static void pauseAtRandom(uint32_t seed, uint32_t most_us);
  // As the identity of a device that processes share by turns.
  void takeTurnsAs(std::string identity) { identity_ = std::move(identity); }
  std::string identity() const override { return identity_; }
  bool runsProcessesTogether() const override { return identity_.empty(); }
  // From now on called before another rank's memory is opened.
  void beforeImport(std::function<void()> call) { before_import_ = std::move(call); }
  // From now on each stream waits until the flag is 1 before it copies or runs a kernel.
  void holdCopies(uint32_t* flag);

  void* importMemory(const MemoryHandle& handle) override {
    count("importMemory");
    if (before_import_) before_import_();
    return FastDevice::importMemory(handle);
  }
  // From now on counts the calls that enqueue, ask an event, or allocate, by name.
  void countCalls();
  std::map<std::string, int> countedCalls();

  void* allocate(size_t bytes, Site site) override {
    count("allocate");
    return FastDevice::allocate(bytes, site);
  }
  void* allocatePinned(size_t bytes, Site site) override {
    count("allocatePinned");
    return FastDevice::allocatePinned(bytes, site);
  }
  void registerPinned(void* memory, size_t bytes) override {
    count("registerPinned");
    FastDevice::registerPinned(memory, bytes);
  }
  Event createEvent() override {
    count("createEvent");
    return FastDevice::createEvent();
  }
  Stream createStream(int priority) override;
  void destroyStream(Stream stream) override;
  bool isCapturing(Stream stream) override { return captureOf(stream) != 0; }
  void flagOps(Stream stream, std::span<const FlagOp> ops) override;
  void launchParts(std::vector<KernelLaunch> parts, Stream stream, Site site) override;
  void record(Event event, Stream stream, Site site) override;
  void wait(Stream stream, Event event, Site site) override;
  bool query(Event event) override;
  void synchronize(Event event, double timeout_s, const InterruptCheck& check, Site site) override;
  void synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                   Site site) override;

 private:
  void submit(Op op, Stream stream) override;
  std::shared_ptr<Capture> capturing(const FastStream* stream);
  void refuseCaptured(const char* call, Event event);
  void count(const char* call);

  std::function<void()> before_import_;
  std::string identity_;
  int num_queues_ = 0;  // 0: each stream has its own
  std::vector<std::shared_ptr<FastStream>> queues_;
  size_t next_queue_ = 0;
  std::mutex captures_mutex_;  // all below
  std::map<const FastStream*, std::shared_ptr<Capture>> captures_;
  std::map<uintptr_t, Capture::Moment> captured_events_;  // last recorded in a capture
  uint64_t next_capture_ = 1;
  std::optional<int> threads_left_;
  std::optional<uint64_t> most_queued_;
  std::atomic<bool> blocks_{false};
  std::mutex driver_mutex_;  // of the calls that enqueue, where a full stream blocks
  uint32_t* copies_wait_for_ = nullptr;
  std::set<uintptr_t> streams_with_threads_;
  std::optional<std::map<std::string, int>> calls_;
  std::optional<std::thread::id> within_;  // a call of this thread that is one for the driver
};

}  // namespace hdpcomm::testing
