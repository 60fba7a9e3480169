// SimDevice's check mode: records every call in the session.
#pragma once

#include <memory>

#include "device/simulated/stream_device.hpp"
#include "testing/check/session.hpp"

namespace hdpcomm::testing::check {

struct RecordMark {
  NodeId node = kNoNode;
};

// A stream handle maps to its entity in the session, an event to the node of its last record.
class CheckedDevice final : public StreamDevice<int, RecordMark> {
 public:
  // Null while no check runs.
  static std::shared_ptr<MemoryDevice> open(int ordinal);

  CheckedDevice(int ordinal, std::shared_ptr<Session> session);
  ~CheckedDevice() override { session_->keepMapped(MemoryTable::get().releaseAll(this)); }

  std::string name() const override { return "sim, checked"; }

  void* allocate(size_t bytes, Site site) override;
  void free(void* memory, Site site) override;
  void* allocatePinned(size_t bytes, Site site) override;
  void freePinned(void* memory, Site site) override;
  MemoryHandle exportMemory(void* memory) override;
  void* importMemory(const MemoryHandle& handle) override;

  Stream createStream(int priority) override;
  void destroyStream(Stream stream) override;
  void record(Event event, Stream stream, Site site) override;
  void wait(Stream stream, Event event, Site site) override;
  bool query(Event event) override;
  void synchronize(Event event, double timeout_s, const InterruptCheck& check, Site site) override;
  void synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                   Site site) override;

  void storeFlag(uint32_t* flag, uint32_t value, Site site) override;
  void annotateRead(const void* data, size_t bytes, Site site) override;
  void annotateWrite(void* data, size_t bytes, Site site) override;
  void annotateFree(const void* data, size_t bytes, Site site) override;
  void annotateRelease(uint64_t key) override;
  void annotateAcquire(uint64_t key) override;

 private:
  void submit(Op op, Stream stream) override { session_->submit(find(stream), std::move(op)); }

  std::shared_ptr<Session> session_;
};

}  // namespace hdpcomm::testing::check
