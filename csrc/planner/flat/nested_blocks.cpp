#include "planner/flat/nested_blocks.hpp"

#include "planner/model/jobs.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kAboutAsLong = 0.5;  // of the longest sequence; shorter ones fill what is left
constexpr double kMostUnits = 64;     // of a rank; with more of them little is left over
constexpr int kTargets = 9;

}  // namespace

std::optional<Plan> planNested(const Problem& problem, double lower_bound, double limit) {
  const CostModel& cost = problem.cost();
  std::vector<Job> jobs = makeJobs(problem);
  const double about_as_long = kAboutAsLong * jobs.front().load.tokens;
  size_t long_ones = 0;
  while (long_ones < jobs.size() && jobs[long_ones].load.tokens >= about_as_long) ++long_ones;
  const bool packed = long_ones == jobs.size();  // micro-batches may have several of them
  const bool short_ones =
      2 * jobs.front().load.tokens <= static_cast<double>(cost.memory().capacity);
  if (short_ones && !packed) return {};

  std::vector<NestedBlocks::Unit> units;
  double others_s = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (i < long_ones) {
      units.push_back({jobs[i].load, jobs[i].min_size});
    } else {
      if (jobs[i].min_size > 1) return {};
      others_s += cost.leastWork(jobs[i].load);
    }
  }
  if (static_cast<double>(units.size()) > kMostUnits * problem.ranks()) return {};

  NestedBlocks blocks(cost, std::move(units), others_s, limit, packed);
  BlockPacker packer(problem, jobs);
  // The best of all that were placed; plans are made of that alone.
  std::vector<NestedBlocks::Micro> best;
  Packing best_packing;
  bool found = false;
  double low = lower_bound;
  double high = limit;
  double target = lower_bound * (1 + 1e-6);
  for (int tried = 0; tried < kTargets && low < high; ++tried) {
    if (blocks.fit(target)) {
      high = target;
      std::vector<double> ready;
      std::vector<NestedBlocks::Micro> placed = blocks.place(ready);
      double makespan = *std::max_element(ready.begin(), ready.end());
      if (!packed) {
        std::vector<Placement> placements;
        for (const NestedBlocks::Micro& micro : placed) placements.push_back(micro.placement);
        makespan = packer.runPlaced(std::move(placements), ready, long_ones);
      }
      if (makespan < limit) {
        limit = makespan;
        found = true;
        best = std::move(placed);
        if (!packed) best_packing = packer.take();
      }
    } else {
      low = target;
    }
    target = 0.5 * (low + high);
  }
  if (!found) return {};
  if (!packed) return finishPlan(problem, collectPlaced(problem, jobs, best_packing));
  std::vector<Placement> placements;
  for (const NestedBlocks::Micro& micro : best) placements.push_back(micro.placement);
  std::vector<MicroBatch> batches = placedBatches(problem, jobs, placements);
  for (size_t i = 0; i < batches.size(); ++i) {
    batches[i].sequences.clear();
    for (const int32_t unit : best[i].units) batches[i].sequences.push_back(jobs[unit].sequence);
  }
  return finishPlan(problem, std::move(batches));
}

}  // namespace hdpcomm::planner
