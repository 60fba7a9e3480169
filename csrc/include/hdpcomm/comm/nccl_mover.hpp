// Messages and schedules by one global NCCL communicator (transport/nccl_world.hpp).
#pragma once

#include <memory>
#include <vector>

#include "hdpcomm/collective/cost.hpp"
#include "hdpcomm/comm/scratch.hpp"
#include "hdpcomm/comm/stream_mover.hpp"
#include "hdpcomm/transport/nccl_world.hpp"

namespace hdpcomm {

class StreamEngine;

// An NcclDevice on the streams of a device; scratch memory comes from a pool.
class StreamNcclDevice final : public NcclDevice {
 public:
  explicit StreamNcclDevice(DevicePtr device) : device_(std::move(device)), pool_(device_) {}

  // What the next allocate() of this stream returns.
  void reserve(size_t bytes, Stream stream, bool captured);
  size_t bytes() const { return pool_.bytes(); }

  void* allocate(size_t bytes, NcclStream stream) override;
  void release(void* /*memory*/, NcclStream /*stream*/) override {}  // the stream keeps it
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
  NcclMover(DevicePtr device, std::shared_ptr<StreamNcclDevice> memory,
            std::unique_ptr<NcclWorld> world, const NcclCosts& costs);

  const char* name() const override { return "nccl"; }
  size_t scratchBytes() const override { return memory_->bytes(); }
  Communicator::Planning planning() const override;
  void prepare(const Messages& sends, const Messages& recvs) override;
  void prepare(const Collective& operation) override;
  std::vector<Stream> exchange(const Exchange& operation, const Look& look) override;
  void collective(const Collective& operation, const Look& look) override;
  void checkHealth() override { world_->checkAsync(); }
  std::vector<Stream> streams() const override { return {background_stream_.get()}; }
  // Nothing but the end of the communicator ends its kernels.
  void release(Stream control) override;
  void retire() override;
  TransportStats stats() const override;
  uint64_t predictedBufferBytes() const override;

 private:
  static NcclWorld::Operation operationOf(const Collective& operation);

  const DevicePtr device_;
  const std::shared_ptr<StreamNcclDevice> memory_;
  const OwnedStream background_stream_;  // exchanges in the background
  const NcclCosts costs_;
  std::unique_ptr<NcclWorld> world_;
  NcclStats last_;  // after retire()
};

// Collective over the host world of `comm`: rank 0's id goes round, all join one communicator, and
// every rank connects with its neighbours up to `connect_distance` in the order of the ranks. The
// costs of rank 0 are everybody's, so that all choose alike. Throws what NcclWorld does; the ranks
// may be on several hosts.
std::shared_ptr<StreamEngine> joinNccl(const Communicator& comm, DevicePtr device,
                                       const std::shared_ptr<const NcclApi>& api,
                                       int connect_distance, NcclCosts costs);

}  // namespace hdpcomm
