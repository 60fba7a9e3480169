// The transfers of a schedule's steps by NCCL: one group a step (groups.hpp says when more) on the
// run's stream. What is to be reduced arrives in scratch memory first.
#pragma once

#include <memory>
#include <vector>

#include "transport/stream/nccl/groups.hpp"
#include "transport/stream/runner.hpp"

namespace hdpcomm::nccl {

class NcclTransfers final : public StepTransfers {
 public:
  // Buffer::kTemp of the run is the beginning of the plan's scratch memory.
  NcclTransfers(NcclWorld& world, DevicePtr device, std::shared_ptr<const GroupPlan> plan,
                const ScheduleRun& run);

  void start(size_t step, const WaitCheck& check) override;
  void finish(const WaitCheck& check) override { start(plan_->schedule->steps.size(), check); }

 private:
  void runGroup(const Group& group, const WaitCheck& check);

  NcclWorld& world_;
  const DevicePtr device_;
  const std::shared_ptr<const GroupPlan> plan_;
  const ScheduleRun run_;
  std::byte* const scratch_;
  size_t next_ = 0;  // group
};

}  // namespace hdpcomm::nccl
