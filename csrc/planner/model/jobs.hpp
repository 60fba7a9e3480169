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
inline std::vector<Job> makeJobs(const Problem& problem) {
  std::vector<Job> jobs;
  jobs.reserve(problem.count());
  for (const int32_t sequence : problem.byLength()) {
    if (problem.rides(sequence)) continue;
    Job job;
    job.sequence = sequence;
    job.min_size = problem.minRanks(sequence);
    job.load = problem.load(sequence);
    job.min_size_s = problem.cost().seconds(job.load, job.min_size);
    jobs.push_back(job);
  }
  return jobs;
}

}  // namespace hdpcomm::planner
