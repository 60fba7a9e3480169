// Messages and schedules by one global NCCL communicator (nccl_world.hpp).
#pragma once

#include <memory>
#include <vector>

#include "collective/cost.hpp"
#include "transport/stream/nccl/groups.hpp"
#include "transport/stream/nccl/nccl_world.hpp"
#include "transport/stream/runner.hpp"
#include "transport/stream/scratch.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

// What kAuto goes by.
struct NcclCosts {
  TransportCosts inside;  // a node
  TransportCosts between;
};

class NcclMover final : public StreamMover {
 public:
  NcclMover(DevicePtr device, std::unique_ptr<NcclWorld> world, const NcclCosts& costs);

  const char* name() const override { return "nccl"; }
  size_t scratchBytes() const override { return scratch_.bytes(); }
  PlanningRules planning(const std::vector<int>& ranks) const override;
  bool capturesAlike(int /*peer*/) const override { return true; }
  std::unique_ptr<PreparedExchange> prepare(const Exchange& operation) override;
  std::unique_ptr<PreparedCollective> prepare(const Collective& operation) override;
  // Whether NCCL's own collective does the operation.
  bool runsWhole(const Collective& operation) const;
  // Runs the schedule of an operation, but for the transfers with ranks that the world leaves out.
  std::unique_ptr<ScheduleRunner> prepareSchedule(const Collective& operation);
  void checkHealth() override { world_->checkAsync(); }
  std::vector<Stream> streams() const override { return {background_stream_.get()}; }
  // Nothing but the end of the communicator ends its kernels.
  void release(Stream /*control*/) override { world_->abort(); }
  void deviceLost() override { world_->abort(); }
  void retire() override;
  Stats stats() const override { return world_ != nullptr ? world_->stats() : last_stats_; }

 private:
  class NcclExchange;
  class WholeCollective;

  const DevicePtr device_;
  ScratchPool scratch_;
  const OwnedStream background_stream_;  // exchanges in the background
  const DeviceMemory tokens_;            // what empty messages of an exchange are instead
  const NcclCosts costs_;
  nccl::GroupPlans plans_;
  std::unique_ptr<NcclWorld> world_;
  Stats last_stats_;  // after retire()
};

}  // namespace hdpcomm
