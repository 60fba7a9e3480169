// The sequences of a step as they are placed: each with its riders, longest first.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

struct Job {
  int32_t sequence = 0;
  int min_size = 1;
  int fastest = 0;  // ranks; 0: not computed yet
  Load load;
  double min_size_s = 0;  // predicted time on min_size ranks
  double fastest_s = 0;   // on `fastest` ranks
};

// Jobs by falling length, on the smallest sizes that memory allows.
std::vector<Job> makeJobs(const Problem& problem);

}  // namespace hdpcomm::planner
