#include "planner/search/search.hpp"

namespace hdpcomm::planner {
namespace {

// Split backward passes make plans end earlier than is known of whole ones.
bool beats(const PlanSearch& search, double least) {
  return search.cluster().split || least < search.best->makespan;
}

constexpr Candidate<PlanSearch> kBaselines[] = {
    {"naive", [](const PlanSearch& search) { return beats(search, leastNaive(search.problem)); },
     [](PlanSearch& search) { search.take(planNaive(search.problem, search.limit())); }},
    {"pow2", [](const PlanSearch& search) { return beats(search, leastPow2(search.problem)); },
     [](PlanSearch& search) { search.take(planPow2(search.problem, search.limit())); }},
    {"static",
     [](const PlanSearch& search) {
       return beats(search, leastStatic(search.problem, search.options));
     },
     [](PlanSearch& search) {
       search.take(planStatic(search.problem, search.options, search.limit()));
     }},
};

}  // namespace

std::string improvedBy(const std::string& made_by, const std::string& candidate) {
  return made_by.ends_with(candidate) ? made_by : made_by + " + " + candidate;
}

bool PlanSearch::small(double limit) const {
  return static_cast<double>(problem.count()) * problem.ranks() <= limit;
}

double PlanSearch::limit() const { return best ? best->makespan : kNoLimit; }

void PlanSearch::take(std::optional<Plan> plan) {
  if (!plan || (best && plan->makespan >= best->makespan)) return;
  made_by = plan->made_by.empty() ? trying : std::move(plan->made_by);
  best = std::move(plan);
}

Plan PlanSearch::result() && {
  best->made_by = std::move(made_by);
  return std::move(*best);
}

void tryBaselines(PlanSearch& search) {
  if (search.options.baselines) tryAll(kBaselines, search);
}

}  // namespace hdpcomm::planner
