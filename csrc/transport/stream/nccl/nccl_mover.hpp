// Messages and schedules by one global NCCL communicator (transport/nccl_world.hpp).
#pragma once

#include <memory>
#include <vector>

#include "collective/cost.hpp"
#include "transport/stream/nccl/nccl_world.hpp"
#include "transport/stream/scratch.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

// An NcclDevice on the streams of a device; scratch memory comes from a pool.
class StreamNcclDevice final : public NcclDevice {
 public:
  explicit StreamNcclDevice(DevicePtr device) : device_(std::move(device)), pool_(device_) {}

  // What the next allocate() of this stream returns.
  void reserve(size_t bytes, Stream stream, bool captured);
  size_t bytes() const { return pool_.bytes(); }
  void free() { pool_.free(); }

  void* allocate(size_t bytes, NcclStream stream) override;
  void release(void* /*memory*/, NcclStream /*stream*/) override {}  // the stream keeps it
  void clear(void* memory, size_t bytes, NcclStream stream) override;
  void copy(void* to, const void* from, size_t bytes, NcclStream stream) override;
  void reduce(void* out, const void* a, const void* b, size_t count, DType dtype, RedOp op,
              NcclStream stream) override;
  void scale(void* data, size_t count, DType dtype, double divisor, NcclStream stream) override;

 private:
  DevicePtr device_;
  ScratchPool pool_;
  std::byte* reserved_ = nullptr;
};

// What kAuto goes by.
struct NcclCosts {
  TransportCosts inside;  // a node
  TransportCosts between;
};

class NcclMover final : public StreamMover {
 public:
  // `landing_bytes`: of the window of `world` if it has one, which has as much again for copies of
  // what is put and lies elsewhere.
  NcclMover(DevicePtr device, std::shared_ptr<StreamNcclDevice> memory,
            std::unique_ptr<NcclWorld> world, const NcclCosts& costs, size_t landing_bytes);

  const char* name() const override { return "nccl"; }
  Zone zoneFor(int /*source*/) const override {
    return {world_ != nullptr && landing_bytes_ > 0 ? world_->window() : nullptr, landing_bytes_};
  }
  bool lands(int /*peer*/) const override { return landing_bytes_ > 0; }
  bool landsTogether(int /*peer*/) const override { return true; }
  size_t scratchBytes() const override { return memory_->bytes(); }
  PlanningRules planning(const std::vector<int>& ranks) const override;
  bool capturesAlike(int /*peer*/) const override { return true; }
  void prepare(const Messages& sends, const Messages& recvs, bool captured) override;
  void prepare(const Collective& operation) override;
  std::vector<Stream> exchange(const Exchange& operation, const Look& look) override;
  void collective(const Collective& operation, const Look& look) override {
    collective(operation, nullptr, look);
  }
  // `beside`: takes the transfers with the ranks that the world leaves out.
  void collective(const Collective& operation, NcclWorld::Beside* beside, const Look& look);
  void checkHealth() override { world_->checkAsync(); }
  std::vector<Stream> streams() const override { return {background_stream_.get()}; }
  // Nothing but the end of the communicator ends its kernels.
  void release(Stream control) override;
  void retire() override;
  TransportStats stats() const override;
  NcclUse ncclUse() const override;

 private:
  static NcclWorld::Operation operationOf(const Collective& operation);
  void checkCaptured(const Message& message) const;
  bool inZone(const Message& message) const;
  std::vector<NcclWorld::Message> describe(const Messages& messages, std::byte* token) const;
  void stage(const Messages& messages, std::vector<NcclWorld::Message>& sends, Stream stream);

  const DevicePtr device_;
  const std::shared_ptr<StreamNcclDevice> memory_;
  const OwnedStream background_stream_;  // exchanges in the background
  const DeviceMemory tokens_;            // what empty messages of an exchange are instead
  const NcclCosts costs_;
  const size_t landing_bytes_;
  const OwnedEvent staged_;  // after the puts from the window's second half
  bool puts_ = false;        // of the exchange prepared last
  std::unique_ptr<NcclWorld> world_;
  NcclStats last_;  // after retire()
};

}  // namespace hdpcomm
