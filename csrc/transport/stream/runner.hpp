// Runs the schedule of a collective on a stream. Moves are copies and kernels of that stream; the
// transfers of each step go over links, by NCCL, or by both, each carrying those of its own peers:
//
//   stream   moves of step 0 | NCCL's group of step 0   | moves of step 1 | ...
//   lanes                     \ transfers over links    /
#pragma once

#include <memory>
#include <vector>

#include "collective/moves.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

// A schedule and what it runs on.
struct ScheduleRun {
  std::shared_ptr<const Schedule> schedule;
  Call call;                      // element type and reduction
  const std::vector<int>& ranks;  // global; must outlive the run
  Buffers buffers;
  Stream stream;

  int globalRank(int group_rank) const { return ranks[static_cast<size_t>(group_rank)]; }
};

// Carries the transfers of a run's steps between this rank and some of its peers.
class StepTransfers {
 public:
  using WaitCheck = StreamMover::WaitCheck;

  virtual ~StepTransfers() = default;
  // Starts the transfers of a step, after all work that the run's stream holds.
  virtual void start(size_t step, const WaitCheck& check) = 0;
  // Later work of the run's stream comes after the step's transfers, except for deferred sends.
  virtual void join() {}
  // After the last step: later work of the run's stream comes after the deferred sends, too.
  virtual void finish(const WaitCheck& check) = 0;
};

class ScheduleRunner final : public StreamMover::PreparedCollective {
 public:
  ScheduleRunner(DevicePtr device, const ScheduleRun& run)
      : device_(std::move(device)), run_(run) {}

  const ScheduleRun& run() const { return run_; }
  // What is added later starts its part of a step first, and is joined last: so transfers beside
  // the stream go before those that hold the stream up.
  void add(std::unique_ptr<StepTransfers> transfers) { transfers_.push_back(std::move(transfers)); }

  Fence enqueue(const StreamMover::WaitCheck& check) && override;

 private:
  const DevicePtr device_;
  const ScheduleRun run_;
  std::vector<std::unique_ptr<StepTransfers>> transfers_;
};

}  // namespace hdpcomm
