#include "planner/block_packer.hpp"

#include <algorithm>

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

std::vector<MicroBatch> placedBatches(const Problem& problem, const std::vector<Job>& jobs,
                                      const std::vector<Placement>& placements) {
  std::vector<MicroBatch> batches;
  for (const Placement& placement : placements) {
    MicroBatch batch;
    std::vector<int32_t> ranks;
    for (const auto& [first, count] : placement.ranges) {
      for (int rank = first; rank < first + count; ++rank) ranks.push_back(rank);
    }
    std::sort(ranks.begin(), ranks.end());
    batch.ranks = ringOrder(std::move(ranks), problem.cost().cluster());
    batch.sequences = problem.withRiders(jobs[placement.job].sequence);
    batch.start = placement.start;
    batches.push_back(std::move(batch));
  }
  return batches;
}

}  // namespace hdpcomm::planner
