// 1F1B by priorities: a device runs a backward pass when one is possible, else the next forward
// pass by index. With several chunks on a device, interleaved 1F1B.
#pragma once

#include <limits>

#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/simulated_step.hpp"

namespace hdpcomm::planner {

// Runs a plan so.
SimulatedStep simulatePriorities(const Problem& problem, const Plan& plan);

// Its makespan alone, which is found faster; one that is not below `limit` as soon as that is
// certain.
double makespanByPriorities(const Problem& problem, const Plan& plan,
                            double limit = std::numeric_limits<double>::infinity());

// Passes whose gradients a device may owe at a time, at most.
int mostInFlight(const Cluster& cluster, int device) noexcept;

}  // namespace hdpcomm::planner
