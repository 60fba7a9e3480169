// 1F1B by levels: the level of a micro-batch is one above the highest of those that its ranks run
// before it. Every device runs the passes of its levels in the order in which a pipeline of that
// many equal micro-batches does, and leaves out those that it has none of. That order of all levels
// has no circle, so neither have parts of it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/pass_costs.hpp"
#include "planner/simulate/simulated_step.hpp"

namespace hdpcomm::planner {

// Runs a plan without slices by levels; for pipelines with one stage on each device.
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
