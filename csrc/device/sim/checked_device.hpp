// SimDevice's check mode: writes every call down in the session.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "memory_device.hpp"
#include "session.hpp"

namespace hdpcomm::sim {

class CheckedDevice final : public SimMemoryDevice {
 public:
  CheckedDevice(int ordinal, std::shared_ptr<Session> session);
  ~CheckedDevice() override { session_->bury(MemoryTable::get().releaseAll(this)); }

  std::string name() const override { return "sim, checked"; }

  void* allocate(size_t bytes, Site site) override;
  void free(void* memory, Site site) override;
  void* allocatePinned(size_t bytes, Site site) override;
  void freePinned(void* memory, Site site) override;
  MemoryHandle exportMemory(void* memory) override;
  void* importMemory(const MemoryHandle& handle) override;

  Stream createStream(int priority) override;
  void destroyStream(Stream stream) override;
  Event createEvent() override;
  void destroyEvent(Event event) override;
  void record(Event event, Stream stream, Site site) override;
  void wait(Stream stream, Event event, Site site) override;
  bool query(Event event) override;
  void synchronize(Event event, double timeout_s, const InterruptCheck& check, Site site) override;
  void synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                   Site site) override;

  void copy(void* dst, const void* src, size_t bytes, Stream stream, Site site) override;
  void fill(void* dst, unsigned char value, size_t bytes, Stream stream, Site site) override;
  void writeValue(Stream stream, uint32_t* flag, uint32_t value, Site site) override;
  void waitValue(Stream stream, uint32_t* flag, uint32_t value, Site site) override;
  void launch(KernelLaunch kernel, Stream stream, Site site) override;

  void storeFlag(uint32_t* flag, uint32_t value, Site site) override;
  uint32_t loadFlag(const uint32_t* flag, Site site) override;
  void annotateRead(const void* data, size_t bytes, Site site) override;
  void annotateWrite(void* data, size_t bytes, Site site) override;
  void annotateFree(const void* data, size_t bytes, Site site) override;
  void annotateRelease(uint64_t key) override;
  void annotateAcquire(uint64_t key) override;

 private:
  int find(Stream stream) const;
  NodeId find(Event event) const;

  std::shared_ptr<Session> session_;
  mutable std::mutex mutex_;            // the two below
  std::map<uintptr_t, int> streams_;    // their entities
  std::map<uintptr_t, NodeId> events_;  // the last record of each
};

}  // namespace hdpcomm::sim
