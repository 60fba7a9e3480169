// Plans in waves that follow each other.
#pragma once

#include <optional>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// For a few long sequences of about the same length: in which a block is left over that is too
// small for one more of them, and too large to be wasted. Waves share all ranks out instead. A plan
// that ends before `limit`, if there is one.
std::optional<Plan> planWaves(const Problem& problem, double lower_bound, double limit);

}  // namespace hdpcomm::planner
