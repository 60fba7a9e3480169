// Discrete-event simulation of one step: every rank has the compute streams of its pipeline stages
// and two copy streams to and from host memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {

struct Span {
  int32_t micro_batch = 0;
  int32_t stage = 0;  // of the model
  bool backward = false;
  double start = 0;
  double end = 0;
  int32_t weights_of = -1;  // the rank that computes gradients of weights, which it does alone
};

// What the simulation of a step finds out.
struct SimulatedStep {
  std::vector<Span> spans;          // by start
  std::vector<double> busy;         // by rank: seconds of compute, summed over its stages
  std::vector<double> exposed;      // by rank: seconds in which a ring waits for KV
  std::vector<double> stalled;      // by rank: seconds in which compute waits for host copies
  std::vector<double> end;          // by rank: when its last backward pass ends
  std::vector<double> peak_tokens;  // by rank: most tokens on the device at once, without the
                                    // offloaded share, on the worst stage
  double makespan = 0;

  // Forgets everything; the figures of each rank are 0.
  void begin(int ranks) {
    *this = SimulatedStep{};
    for (auto* values : {&busy, &exposed, &stalled, &end, &peak_tokens}) values->assign(ranks, 0.0);
  }

  // Sorts the spans by start. A pass starts no earlier than those that it needs and stands behind
  // them, so it stays there.
  void finish(double seconds) {
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span& a, const Span& b) { return a.start < b.start; });
    makespan = seconds;
  }
};

// Runs the plan's micro-batches: a group's forward and backward passes wait for all of its ranks. A
// device runs a backward pass when one is possible (1F1B), else the next forward pass by index
// while fewer than (devices - device) micro-batches are in flight. With several chunks on a device,
// micro-batches go through them in groups (interleaved 1F1B; Narayanan et al., arXiv 2104.04473).
// With one chunk and no slices, the order by levels (level_order.cpp) is taken in its place where
// it ends earlier. Slices of a sequence are in flight together, as as many micro-batches as they
// have tokens for; several chunks run all of them in one group. Split backward passes are those of
// SplitOrder. Without a pipeline, rings that share links take time from each other
// (priority_order.cpp).
SimulatedStep simulate(const Problem& problem, const Plan& plan);

// Its makespan alone, which is found faster; where it is certain not to be below `limit`, one that
// is not either, and that the step does not beat.
double simulatedMakespan(const Problem& problem, const Plan& plan,
                         double limit = std::numeric_limits<double>::infinity());

// Runs a plan in 1F1B by priorities: a device runs a backward pass when one is possible, else the
// next forward pass by index. With several chunks on a device, interleaved 1F1B.
SimulatedStep simulatePriorities(const Problem& problem, const Plan& plan);

// Its makespan alone, which is found faster; one that is not below `limit` as soon as that is
// certain.
double makespanByPriorities(const Problem& problem, const Plan& plan,
                            double limit = std::numeric_limits<double>::infinity());

// Passes whose gradients a device may owe at a time, at most.
int mostInFlight(const Cluster& cluster, int device) noexcept;

// 1F1B by levels: the level of a micro-batch is one above the highest of those that its ranks run
// before it. Every device runs the passes of its levels in the order in which a pipeline of that
// many equal micro-batches does, and leaves out those that it has none of. That order of all levels
// has no circle, so neither have parts of it.
//
// Runs a plan without slices so; for pipelines with one stage on each device.
SimulatedStep simulateLevels(const Problem& problem, const Plan& plan);

// Its makespan alone, which is found faster.
double makespanByLevels(const Problem& problem, const Plan& plan);

// What the makespan depends on: of each micro-batch its ranks and how long its passes take. That is
// less memory than the micro-batches, for searches that try many plans.
struct LevelPasses {
  struct Batch {
    int32_t first_rank;  // of `ranks`
    int32_t num_ranks;
  };
  struct Times {
    double forward;  // seconds
    double backward;
    double copy;  // to host memory, and again from there
  };
  std::vector<Batch> batches;  // in the plan's order
  std::vector<int32_t> ranks;
  std::vector<Times> times;  // of each micro-batch in turn, on each kind of stage

  void clear() {
    batches.clear();
    ranks.clear();
    times.clear();
  }
  // Adds a micro-batch of the ranks that were added to `ranks` since the last one.
  void add();
  // What the one that is added next takes on the next kind of stage.
  void add(const PassCosts& costs) {
    times.push_back({costs.forward.seconds, costs.backward.seconds, costs.copy});
  }
};
// One that is not below `limit` where that is certain.
double makespanByLevels(const Problem& problem, const LevelPasses& passes, double limit);

}  // namespace hdpcomm::planner
