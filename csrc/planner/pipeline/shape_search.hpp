// Looks for the shape of waves (wave_planner.hpp) that gives the shortest plan: several numbers and
// shapes are tried, and the best ones are changed.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

struct ShapedPlans {
  Plan whole;   // without slices
  Plan sliced;  // where that may be better
};

// The best plans; a makespan is infinite, and the plan is empty, where no shape has one.
// `whole_bound`: of plans without slices, which are tried first, as if there were no others.
// Large clusters are searched on a sample of the step, whose best shapes are tried on the whole,
// unless their plans of the sample are clearly longer than `limit`.
ShapedPlans findShape(const Problem& problem, double whole_bound, double lower_bound, double limit);

}  // namespace hdpcomm::planner
