// The lower bound of a step (docs/bound.md), and its parts.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// A time that no plan can beat, however it packs sequences and chooses group sizes.
double lowerBound(const Problem& problem);

// Stages that differ, as if the devices that are counted had no more work than each of them has.
struct CountedStages {
  StageWork work = {1, 1, 1};  // in that of the mean stage
  StagesInPasses stages;
  std::ptrdiff_t first = 0, last = 0;  // devices
  double bound = 0;                    // about
};

// Those that the step may wait for, and the mean of all devices.
std::vector<CountedStages> countedStages(const Problem& problem);

// Part of the bound for pipelines (claim 15): which micro-batches a rank can run within a time when
// what 1F1B leaves idle around them counts, too. These are whole numbers, which counts where the
// longest sequences are of about the same length. Each sequence gets a weight; any weights give a
// bound, so a few are tried. The largest time, from `low` on, that is proved to be too short; `low`
// if none is. `shortest`: least seconds of compute of any micro-batch. `held`: most tokens of a
// micro-batch on a rank in plans that end within a time.
double raiseByPipelineConfigurations(const Problem& problem, const StagesInPasses& stages,
                                     double shortest, double low,
                                     const std::function<double(double)>& held);

}  // namespace hdpcomm::planner
