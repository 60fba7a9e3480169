// The queue of a FakeNccl rank as a device, for ranks that have none: copies and kernels of its
// only stream become items of the queue, all other calls are refused.
#pragma once

#include <cstring>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "testing/fake_nccl.hpp"

namespace hdpcomm::testing {

class FakeQueue final : public DeviceApi {
 public:
  FakeQueue(std::shared_ptr<FakeNccl> fake, int rank) : fake_(std::move(fake)), rank_(rank) {}

  void copy(void* dst, const void* src, size_t bytes, Stream, Site) override {
    fake_->enqueueLocal(rank_, [=] { std::memmove(dst, src, bytes); });
  }
  void fill(void* dst, unsigned char value, size_t bytes, Stream, Site) override {
    fake_->enqueueLocal(rank_, [=] { std::memset(dst, value, bytes); });
  }
  void launch(KernelLaunch kernel, Stream, Site) override {
    fake_->enqueueLocal(rank_, std::move(kernel.cpu));
  }

  std::string name() const override { return "queue of a fake rank"; }
  bool isSim() const override { return true; }
  int ordinal() const override { return rank_; }
  bool canAccessPeer(int) const override { return false; }
  void* allocate(size_t, Site) override { refuse(); }
  void free(void*, Site) override { refuse(); }
  void* allocatePinned(size_t, Site) override { refuse(); }
  void freePinned(void*, Site) override { refuse(); }
  void registerPinned(void*, size_t) override { refuse(); }
  void unregisterPinned(void*) override { refuse(); }
  MemoryHandle exportMemory(void*) override { refuse(); }
  void* importMemory(const MemoryHandle&) override { refuse(); }
  void closeMemory(void*) override { refuse(); }
  Stream createStream(int) override { refuse(); }
  void destroyStream(Stream) override { refuse(); }
  Event createEvent() override { refuse(); }
  void destroyEvent(Event) override { refuse(); }
  void record(Event, Stream, Site) override { refuse(); }
  void wait(Stream, Event, Site) override { refuse(); }
  bool query(Event) override { refuse(); }
  void synchronize(Event, double, const InterruptCheck&, Site) override { refuse(); }
  void synchronize(Stream, double, const InterruptCheck&, Site) override { refuse(); }
  bool isCapturing(Stream) override { return false; }
  void writeValue(Stream, uint32_t*, uint32_t, Site) override { refuse(); }
  void waitValue(Stream, uint32_t*, uint32_t, Site) override { refuse(); }
  void storeFlag(uint32_t*, uint32_t, Site) override { refuse(); }
  void annotateRead(const void*, size_t, Site) override {}
  void annotateWrite(void*, size_t, Site) override {}
  void annotateFree(const void*, size_t, Site) override {}
  void annotateRelease(uint64_t) override {}
  void annotateAcquire(uint64_t) override {}

 private:
  [[noreturn]] static void refuse() {
    throwInvalidUsage("the queue of a fake rank has no such call");
  }

  std::shared_ptr<FakeNccl> fake_;
  int rank_;
};

}  // namespace hdpcomm::testing
