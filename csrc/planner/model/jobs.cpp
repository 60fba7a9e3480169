#include "planner/model/jobs.hpp"

namespace hdpcomm::planner {

std::vector<Job> makeJobs(const Problem& problem) {
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
