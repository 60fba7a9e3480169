// Discrete-event simulation of one step: every rank has the compute streams of its pipeline stages
// and two copy streams to and from host memory.
#pragma once

#include <limits>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/simulated_step.hpp"

namespace hdpcomm::planner {

// Runs the plan's micro-batches: a group's forward and backward passes wait for all of its ranks. A
// device runs a backward pass when one is possible (1F1B), else the next forward pass by index
// while fewer than (devices - device) micro-batches are in flight. With several chunks on a device,
// micro-batches go through them in groups (interleaved 1F1B; Narayanan et al., arXiv 2104.04473).
// With one chunk and no slices, the order by levels (level_order.hpp) is taken in its place where
// it ends earlier. Slices of a sequence are in flight together, as as many micro-batches as they
// have tokens for; several chunks run all of them in one group. Split backward passes are those of
// SplitOrder. Without a pipeline, rings that share links take time from each other
// (priority_order.cpp).
SimulatedStep simulate(const Problem& problem, const Plan& plan);

// Its makespan alone, which is found faster; where it is certain not to be below `limit`, one that
// is not either, and that the step does not beat.
double simulatedMakespan(const Problem& problem, const Plan& plan,
                         double limit = std::numeric_limits<double>::infinity());

}  // namespace hdpcomm::planner
