// The lower bound of a step (docs/bound.md).
#pragma once

#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// A time that no plan can beat, however it packs sequences and chooses group sizes.
double lowerBound(const Problem& problem);

}  // namespace hdpcomm::planner
