// What one pass of a micro-batch through one stage takes; both simulated orders use it.
#pragma once

#include <algorithm>
#include <limits>
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

PassCosts passCosts(const Problem& problem, const MicroBatch& batch);
PassCosts passCosts(const Problem& problem, const MicroBatch& batch, const Work& work);

// The same for whole sequences on one rank of this speed.
PassCosts passCostsOfOne(const CostModel& cost, const Load& load, double speed);

// What the devices of a rank run: seconds of each of them, and the shortest pass of each kind.
struct RankTime {
  double busy = 0;
  double forward = std::numeric_limits<double>::infinity();
  double backward = std::numeric_limits<double>::infinity();

  void add(const Cluster& cluster, double forward_s, double backward_s) noexcept {
    busy += cluster.chunks * (forward_s + backward_s);
    forward = std::min(forward, forward_s);
    backward = std::min(backward, cluster.split ? 0 : backward_s);
  }
};
std::vector<RankTime> rankTimes(const Problem& problem, const Plan& plan,
                                const std::vector<PassCosts>& costs);

// Seconds that a pipeline takes at least, in any order: what the busiest rank runs, and the way of
// its shortest passes down all other devices and back.
double leastMakespan(const Problem& problem, const std::vector<RankTime>& ranks);

}  // namespace hdpcomm::planner
