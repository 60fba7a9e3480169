// Part of the lower bound for pipelines (docs/bound.md, claim 15): which micro-batches a rank can
// run within a time when what 1F1B leaves idle around them counts, too. These are whole numbers,
// which counts where the longest sequences are of about the same length. Each sequence gets a
// weight; any weights give a bound, so a few are tried.
#pragma once

#include <functional>

#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The largest time, from `low` on, that is proved to be too short; `low` if none is. `shortest`:
// least seconds of compute of any micro-batch. `held`: most tokens of a micro-batch on a rank in
// plans that end within a time.
double raiseByPipelineConfigurations(const Problem& problem, const StagesInPasses& stages,
                                     double shortest, double low,
                                     const std::function<double(double)>& held);

}  // namespace hdpcomm::planner
