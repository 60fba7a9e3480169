// SimDevice's fast mode: each stream has a thread, events are counts of finished operations.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "device/simulated/fast_stream.hpp"
#include "device/simulated/stream_device.hpp"

namespace hdpcomm::simulated {

// Asked first by openSimDevice; null but in tests, whose checks open devices of their own.
extern std::atomic<std::shared_ptr<MemoryDevice> (*)(int ordinal)> open_checked;

class FastDevice : public StreamDevice<std::shared_ptr<FastStream>, Point> {
 public:
  explicit FastDevice(int ordinal);
  ~FastDevice() override;

  std::string name() const override { return "sim"; }

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

  void storeFlag(uint32_t* flag, uint32_t value, Site site) override;

 protected:
  void submit(Op op, Stream stream) override;

  std::shared_ptr<DeviceState> state_ = std::make_shared<DeviceState>();

 private:
  void checkFault() const override;
  void await(const Point& point, double timeout_s, const InterruptCheck& check, Site site);

  // Destroyed streams whose threads may still run; under mutex_.
  std::vector<std::shared_ptr<FastStream>> retired_;
};

}  // namespace hdpcomm::simulated
