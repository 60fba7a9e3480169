// Plans for sequences of about the same length, of which a whole number of waves leaves ranks idle.
// Blocks of neighbouring ranks run them in the patterns of block_patterns.hpp: 27 sequences on 5
// ranks are five waves of one rank each, then two of all 5. With the target time, the numbers of
// ranks and sequences vary from block to block.
#pragma once

#include <optional>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// The best plan of nested blocks that ends before `limit`, if there is one.
std::optional<Plan> planNested(const Problem& problem, double lower_bound, double limit);

}  // namespace hdpcomm::planner
