// Discrete-event simulation of one step: every rank has the compute streams of its pipeline stages
// and two copy streams to and from host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/plan.hpp"

namespace hdpcomm::planner {

struct Span {
  int32_t micro_batch = 0;
  int32_t stage = 0;  // of the model
  bool backward = false;
  double start = 0;
  double end = 0;
  int32_t weights_of = -1;  // the rank that computes gradients of weights, which it does alone
};

struct SimulatedStep {
  std::vector<Span> spans;          // by start
  std::vector<double> busy;         // by rank: seconds of compute, summed over its stages
  std::vector<double> exposed;      // by rank: seconds in which a ring waits for KV
  std::vector<double> stalled;      // by rank: seconds in which compute waits for host copies
  std::vector<double> end;          // by rank: when its last backward pass ends
  std::vector<double> peak_tokens;  // by rank: most tokens on the device at once, without the
                                    // offloaded share, on the worst stage
  double makespan = 0;
};

// Runs the plan's micro-batches: a group's forward and backward passes wait for all of its ranks. A
// device runs a backward pass when one is possible (1F1B), else the next forward pass by index
// while fewer than (devices - device) micro-batches are in flight. With several chunks on a device,
// micro-batches go through them in groups (interleaved 1F1B; Narayanan et al., arXiv 2104.04473).
// With one chunk, the order by levels (level_order.hpp) is taken in its place where it ends
// earlier. Split backward passes are those of split_order.hpp. Without a pipeline, rings that share
// links take time from each other (link_sharing.hpp).
SimulatedStep simulate(const Problem& problem, const Plan& plan);

// The same in order of priorities alone; `with_weights`: as of simulateLevels().
SimulatedStep simulatePriorities(const Problem& problem, const Plan& plan,
                                 bool with_weights = true);

// Passes whose gradients a device may owe at a time, at most.
int mostInFlight(const Cluster& cluster, int device) noexcept;

}  // namespace hdpcomm::planner
