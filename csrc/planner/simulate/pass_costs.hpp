// What one pass of a micro-batch through one stage takes; both simulated orders use it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

struct PassCosts {
  struct Pass {
    double seconds = 0;
    double exposed = 0;  // part of `seconds` that waits for KV
    // What each ring step after the first takes: compute, and beside it the message, over a link
    // that no other ring uses.
    double compute = 0;
    double bytes = 0;
    double latency = 0;
    int steps = 0;

    // Where bytes take so many times as long.
    double secondsAt(double slowdown) const {
      const double wait = std::max(0.0, bytes * slowdown + latency - compute);
      return seconds - exposed + steps * wait;
    }
  };
  Pass forward, backward;
  double weights = 0;   // of the backward pass: gradients of weights, where these are put off
  double copy = 0;      // seconds of the copies to host memory, and again of those back
  double resident = 0;  // tokens that stay on the device
};

// On a stage of this kind.
PassCosts passCosts(const Problem& problem, const MicroBatch& batch, const Work& work, int kind);

// The same for whole sequences on one rank of this speed, by the costs of a kind.
PassCosts passCostsOfOne(const CostModel& cost, const Load& load, double speed);

// Those of all micro-batches of a plan on all kinds of stages.
class PlanCosts {
 public:
  PlanCosts(const Problem& problem, const Plan& plan);

  const PassCosts& on(size_t batch, int stage) const {
    return all_[batch * kinds_ + kind_of_[stage]];
  }
  std::span<const PassCosts> onKinds(size_t batch) const { return {&all_[batch * kinds_], kinds_}; }
  // A micro-batch's shortest forward and backward pass on any stage.
  std::pair<double, double> shortest(size_t batch) const {
    double forward = std::numeric_limits<double>::infinity(), backward = forward;
    for (const PassCosts& each : onKinds(batch)) {
      forward = std::min(forward, each.forward.seconds);
      backward = std::min(backward, each.backward.seconds);
    }
    return {forward, backward};
  }

 private:
  size_t kinds_;
  std::vector<int> kind_of_;
  std::vector<PassCosts> all_;
};

// What the devices of each rank run.
class RankTimes {
 public:
  explicit RankTimes(const Problem& problem);
  RankTimes(const Problem& problem, const Plan& plan, const PlanCosts& costs);

  void add(int32_t rank, int kind, double forward_s, double backward_s) {
    Time& time = times_[rank * kinds_ + kind];
    time.busy += forward_s + backward_s;
    time.forward = std::min(time.forward, forward_s);
    time.backward = std::min(time.backward, cluster_.split ? 0 : backward_s);
  }

  // Seconds of all passes of a device.
  double busy(int32_t rank, int device) const;
  // The least seconds of the way of a rank's last micro-batch from a device back to the first one.
  double wayBack(int32_t rank, int device) const;
  // Seconds that a pipeline takes at least, in any order: what a device runs, and the way of its
  // rank's shortest passes from the first device to it and back.
  double leastMakespan() const;

 private:
  struct Time {  // on a stage of a kind
    double busy = 0;
    double forward = std::numeric_limits<double>::infinity();  // the shortest pass
    double backward = std::numeric_limits<double>::infinity();
  };

  const Time& of(int32_t rank, int stage) const {
    return times_[rank * kinds_ + cost_.kindOf()[stage]];
  }

  const CostModel& cost_;
  const Cluster& cluster_;
  const size_t kinds_;
  std::vector<Time> times_;
};

}  // namespace hdpcomm::planner
