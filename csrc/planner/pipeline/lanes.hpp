// Plans in slices that give each rank the same work, whatever the others run meanwhile.
#pragma once

#include <optional>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Plans the step as if each rank were one device that holds what all devices of its pipeline do
// together. Then it cuts what is high into slices: long micro-batches into their sequences or
// smaller packs, long sequences into slices of about equal time. Ranks need not keep step, as
// devices run what there is room for (priority_order.cpp). Several heights are tried. A plan that
// ends before `limit`, if there is one.
std::optional<Plan> planLanes(const Problem& problem, double lower_bound, double limit);

}  // namespace hdpcomm::planner
