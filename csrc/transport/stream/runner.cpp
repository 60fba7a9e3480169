#include "transport/stream/runner.hpp"

#include <ranges>

#include "transport/stream/launch.hpp"

namespace hdpcomm {
namespace {

// Moves as work of the run's stream.
struct StreamMath {
  DeviceApi& device;
  const ScheduleRun& run;

  void copy(std::byte* to, const std::byte* from, size_t bytes) const {
    device.copy(to, from, bytes, run.stream);
  }
  void reduce(std::byte* to, const std::byte* from, size_t count) const {
    device::launchReduce(
        device, {to, to, from, static_cast<int64_t>(count), run.call.dtype, run.call.redop},
        run.stream);
  }
  void average(std::byte* to, size_t count) const {
    device::launchDivide(
        device,
        {to, static_cast<int64_t>(count), static_cast<double>(run.ranks.size()), run.call.dtype},
        run.stream);
  }
};

}  // namespace

Fence ScheduleRunner::enqueue(const StreamMover::WaitCheck& check) && {
  const StreamMath math{*device_, run_};
  const size_t element_bytes = dtypeBytes(run_.call.dtype);
  const std::vector<Step>& steps = run_.schedule->steps;
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const Move& move : steps[i].moves) doMove(move, run_.buffers, element_bytes, math);
    for (const auto& each : std::views::reverse(transfers_)) each->start(i, check);
    for (const auto& each : transfers_) each->join();
  }
  for (const auto& each : transfers_) each->finish(check);
  return nullptr;
}

}  // namespace hdpcomm
