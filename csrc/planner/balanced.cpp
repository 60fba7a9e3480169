// The policies "balanced" and "pipeline": an extension of ByteScale's DP-Balance. A block is a run
// of neighbouring ranks that become free at the same time. Sequences are placed longest first; each
// takes part of one block, with the fewest ranks on which it ends before a target time, so that no
// rank waits for another. Short sequences come last, each onto the least loaded rank. Several
// targets near the lower bound are tried, and the shortest plan is kept.
#include <algorithm>
#include <limits>

#include "planner/block_packer.hpp"
#include "planner/plan.hpp"

namespace hdpcomm::planner {
namespace {

// Makespan / lower bound below which a round of further targets is skipped, by round.
constexpr double kGoodEnough[] = {1.002, 1.008};
constexpr double kGoodGap = 0.004;        // below this, local search is not worth its time
constexpr double kRefineLimit = 1 << 15;  // sequences x ranks, for local search

std::vector<Job> makeJobs(const Problem& problem) {
  std::vector<Job> jobs;
  jobs.reserve(problem.count());
  for (const int32_t sequence : problem.byLength()) {
    Job job;
    job.sequence = sequence;
    job.min_size = problem.minRanks(sequence);
    job.load.add(problem.lengths()[sequence]);
    job.min_size_s = problem.cost().seconds(job.load, job.min_size);
    jobs.push_back(job);
  }
  return jobs;
}

std::vector<MicroBatch> collect(const Problem& problem, const std::vector<Job>& jobs,
                                const BlockPacker& packer) {
  std::vector<MicroBatch> batches;
  for (const Placement& placement : packer.placements()) {
    MicroBatch batch;
    std::vector<int32_t> ranks;
    for (const auto& [first, count] : placement.ranges) {
      for (int rank = first; rank < first + count; ++rank) ranks.push_back(rank);
    }
    std::sort(ranks.begin(), ranks.end());
    batch.ranks = ringOrder(std::move(ranks));
    batch.sequences = {jobs[placement.job].sequence};
    batch.start = placement.start;
    batches.push_back(std::move(batch));
  }
  const int64_t capacity = problem.cost().memory().capacity;
  for (const Slot& slot : packer.slots()) {
    double start = slot.start;
    for (auto& bin : packBestFit(problem.lengths(), slot.sequences, capacity)) {
      MicroBatch batch;
      batch.ranks = {slot.rank};
      batch.sequences = std::move(bin);
      batch.start = start;
      price(problem, batch);
      start += batch.predicted_s;
      batches.push_back(std::move(batch));
    }
  }
  return batches;
}

// Searches for the target time that gives the shortest plan: first the lower bound, then times
// between it and the best makespan so far.
Plan planBlocks(const Problem& problem, double lower_bound, int stages) {
  std::vector<Job> jobs = makeJobs(problem);
  if (jobs.empty()) return finishPlan(problem, {});
  BlockPacker packer(problem, jobs, stages);
  double best = std::numeric_limits<double>::infinity();
  double best_target = 0;
  bool best_fill = false;
  const auto attempt = [&](double target) {
    for (const bool fill : {false, true}) {
      if (best <= lower_bound * kGoodEnough[0]) return;
      const double makespan = packer.run(target, fill);
      if (makespan >= best) continue;
      best = makespan;
      best_target = target;
      best_fill = fill;
    }
  };
  attempt(lower_bound * (1 + 1e-6));
  for (const double good_enough : kGoodEnough) {
    if (best <= lower_bound * good_enough) break;
    const double span = best - lower_bound;
    for (const double share : {0.1, 0.25, 0.45, 0.7}) {
      const double target = lower_bound + share * span;
      if (target >= best) break;
      attempt(target);
    }
  }
  packer.run(best_target, best_fill);
  return finishPlan(problem, collect(problem, jobs, packer));
}

// Every pack runs on all ranks: no idle time, but the most transfers.
Plan planUniform(const Problem& problem) {
  PolicyOptions options;
  options.context_ranks = problem.ranks();
  const int64_t longest = *std::max_element(problem.lengths().begin(), problem.lengths().end());
  if (longest > problem.cost().memory().capacity * problem.ranks()) return planNaive(problem);
  return planStatic(problem, options);
}

}  // namespace

Plan planBalanced(const Problem& problem, double lower_bound) {
  Plan plan = planBlocks(problem, lower_bound, 1);
  if (plan.makespan <= lower_bound * (1 + kGoodGap)) return plan;
  const auto good = [&](const Plan& other) { return other.makespan < plan.makespan; };
  if (static_cast<double>(problem.count()) * problem.ranks() > kRefineLimit) return plan;
  for (Plan other : {planUniform(problem), planNaive(problem)}) {
    if (good(other)) plan = std::move(other);
  }
  return refine(problem, std::move(plan), lower_bound);
}

Plan planPipeline(const Problem& problem, double lower_bound) {
  Plan plan = planBlocks(problem, lower_bound, problem.cost().cluster().pipeline);
  Plan aligned = planPow2(problem);  // wide sequences on few ranks leave little to choose
  return aligned.makespan < plan.makespan ? aligned : plan;
}

}  // namespace hdpcomm::planner
