#include "transport/stream/nccl/nccl_transfers.hpp"

#include <utility>

#include "transport/stream/launch.hpp"

namespace hdpcomm::nccl {

NcclTransfers::NcclTransfers(NcclWorld& world, DevicePtr device,
                             std::shared_ptr<const GroupPlan> plan, const ScheduleRun& run)
    : world_(world),
      device_(std::move(device)),
      plan_(std::move(plan)),
      run_(run),
      scratch_(run.buffers[static_cast<size_t>(Buffer::kTemp)]) {}

void NcclTransfers::start(size_t step, const WaitCheck& check) {
  if (step == 0 && run_.call.op == OpCode::kBarrier) {
    device_->fill(scratch_ + plan_->token_offset, 0, 2, run_.stream);
  }
  const std::vector<Group>& groups = plan_->groups;
  for (; next_ < groups.size() && groups[next_].step == step; ++next_) {
    runGroup(groups[next_], check);
  }
}

void NcclTransfers::runGroup(const Group& group, const WaitCheck& check) {
  // The messages of a barrier are empty, and NCCL would send nothing: a byte instead.
  std::byte* const token = scratch_ + plan_->token_offset;
  const bool is_barrier = run_.call.op == OpCode::kBarrier;
  std::vector<NcclWorld::Message> sends;
  std::vector<NcclWorld::Message> recvs;
  std::vector<kernels::ReduceArgs> reductions;
  std::byte* arrival = scratch_ + plan_->arrivals_offset;
  for (const Recv& recv : group.recvs) {
    const int peer = run_.globalRank(recv.peer);
    const size_t bytes = recv.to.bytes;
    if (is_barrier) recvs.push_back({token + 1, 1, peer});
    if (bytes == 0) continue;
    std::byte* const to = addressOf(run_.buffers, recv.to);
    recvs.push_back({recv.reduce ? arrival : to, bytes, peer});
    if (!recv.reduce) continue;
    const auto count = static_cast<int64_t>(bytes / dtypeBytes(run_.call.dtype));
    reductions.push_back({to, addressOf(run_.buffers, recv.operand), arrival, count,
                          run_.call.dtype, run_.call.redop});
    arrival += paddedBytes(bytes);
  }
  for (const Send& send : group.sends) {
    const int peer = run_.globalRank(send.peer);
    if (is_barrier) sends.push_back({token, 1, peer});
    if (send.from.bytes == 0) continue;
    sends.push_back({addressOf(run_.buffers, send.from), send.from.bytes, peer});
  }
  world_.exchange(sends, recvs, ncclStreamOf(run_.stream), check);
  for (const kernels::ReduceArgs& each : reductions) {
    device::launchReduce(*device_, each, run_.stream);
  }
}

}  // namespace hdpcomm::nccl
