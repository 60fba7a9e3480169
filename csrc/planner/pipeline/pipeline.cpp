// Plans for ranks that are pipelines (PP-Balance of ByteScale, section 6.2), judged by the schedule
// that runs.
#include "planner/pipeline/pipeline.hpp"

#include <utility>

#include "planner/bound/bound.hpp"
#include "planner/pipeline/lanes.hpp"
#include "planner/pipeline/shape_search.hpp"
#include "planner/search/candidates.hpp"
#include "planner/search/copied_part.hpp"
#include "planner/search/local_search.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kRefineLimit = 1 << 10;  // sequences x ranks, for local search
// Larger clusters with slices are planned in parts of so many ranks; their bounds may be that far
// above that of all.
constexpr int kRanksOfPart[] = {1 << 8};
constexpr double kFair = 0.02;
constexpr double kFar = 1.05;  // of a part's plan, for one without slices that no whole one is near

constexpr int kLarge = 1 << 11;  // ranks from which on a small gap is worth no search in slices:
constexpr double kSmallGap = 0.02;

// The gap to the bound that is left as it is.
double nearBound(const Cluster& cluster) { return cluster.ranks >= kLarge ? kSmallGap : 0; }

constexpr Candidate<PlanSearch> kImprovements[] = {
    {"local search", [](const PlanSearch& search) { return search.small(kRefineLimit); },
     [](PlanSearch& search) {
       search.improve(
           [&](Plan plan) { return refine(search.problem, std::move(plan), search.lower_bound); });
     }},
};

constexpr Candidate<PlanSearch> kSliced[] = {
    {"lanes",
     [](const PlanSearch& search) {
       return search.cluster().mostSlices() > 1 && !search.within(nearBound(search.cluster()));
     },
     [](PlanSearch& search) {
       search.take(planLanes(search.problem, search.lower_bound, search.limit()));
     }},
};

// `unsliced`: set to the least makespan without slices where the problem was not planned in parts.
Plan planOf(const Problem& problem, const PolicyOptions& options, double lower_bound,
            double& unsliced) {
  const bool slices = problem.cost().cluster().mostSlices() > 1;
  const double whole = slices ? lowerBound(problem.inSlices(1)) : lower_bound;
  std::optional<Plan> copies;
  if (slices && problem.cost().cluster().speeds.empty()) {
    copies = planCopiedPart(
        problem, lower_bound, kFair, kRanksOfPart,
        [&](const Problem& part, double bound) { return planOf(part, options, bound, unsliced); });
    if (copies && (copies->makespan <= whole || unsliced >= kFar * copies->makespan)) {
      return std::move(*copies);
    }
  }
  const bool copied = copies.has_value();
  PlanSearch search{problem, options, whole};
  search.take(std::move(copies));
  search.take(findShape(problem, whole, search.limit()));
  tryBaselines(search);
  if (copied) return std::move(search).result();
  tryAll(kImprovements, search);
  unsliced = search.best->makespan;
  search.lower_bound = lower_bound;
  tryAll(kSliced, search);
  return std::move(search).result();
}

}  // namespace

Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  if (problem.count() == 0) return finishPlan(problem, {});
  double unsliced = 0;
  return planOf(problem, options, lower_bound, unsliced);
}

}  // namespace hdpcomm::planner
