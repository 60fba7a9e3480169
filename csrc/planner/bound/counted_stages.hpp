#pragma once

#include <cstddef>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Stages that differ, as if the devices that are counted had no more work than each of them has.
struct CountedStages {
  StageWork work = {1, 1, 1};  // in that of the mean stage
  StagesInPasses stages;
  std::ptrdiff_t first = 0, last = 0;  // devices
  double bound = 0;                    // about
};

// Those that the step may wait for, and the mean of all devices.
std::vector<CountedStages> countedStages(const Problem& problem);

}  // namespace hdpcomm::planner
