// Part of the lower bound (docs/bound.md, claims 12 and 13): which sequences a rank can run one
// after the other within a time, and how many run side by side. Both are whole numbers, which
// counts where the longest sequences are of about the same length. Each sequence gets a weight; any
// weights give a bound, and those of a linear program the best one.
#pragma once

#include <functional>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// What is known of plans that end within a time.
struct ConfigurationCharges {
  double held = 1;      // most tokens of a micro-batch on a rank
  double sequence = 1;  // and of a sequence, which in slices is several of them
  double idle = 0;      // least seconds in which a rank's last stage has nothing to run
  // Least rank-seconds of a sequence in a micro-batch on so many ranks, alone or with others.
  std::function<double(const Load&, int)> work;
};

// The largest time, from `low` on, that is proved to be too short; `low` if none is.
double raiseByConfigurations(const Problem& problem, double low,
                             const std::function<ConfigurationCharges(double)>& charges);

}  // namespace hdpcomm::planner
