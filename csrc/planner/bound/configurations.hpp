// Part of the lower bound (docs/bound.md, claims 12 and 13): which sequences a rank can run one
// after the other within a time, and how many run side by side. Both are whole numbers, which
// counts where the longest sequences are of about the same length. Each sequence gets a weight; any
// weights give a bound, and those of a linear program the best one.
#pragma once

#include <functional>

#include "planner/bound/class_sizes.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The largest time, from `low` on, that is proved to be too short; `low` if none is.
double raiseByConfigurations(const Problem& problem, double low,
                             const std::function<ConfigurationCharges(double)>& charges);

}  // namespace hdpcomm::planner
