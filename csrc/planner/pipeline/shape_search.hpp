// Looks for the shape of waves (wave_planner.hpp) that gives the shortest plan: several numbers and
// shapes are tried, and the best ones are changed.
#pragma once

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The best plan, none of whose sequences runs in slices; empty, with an infinite makespan, where no
// shape has one. Large clusters are searched on a sample of the step, whose best shapes are tried
// on the whole, unless their plans of the sample are clearly longer than `limit`.
Plan findShape(const Problem& problem, double lower_bound, double limit);

}  // namespace hdpcomm::planner
