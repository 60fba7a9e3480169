// Tables of the ways in which a search makes plans. Each says where it applies, and the plan says
// which one made it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "planner/baselines/baselines.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// `applies` is asked when the candidates before it have been tried.
template <class Search>
struct Candidate {
  const char* name;
  bool (*applies)(const Search&);
  void (*make)(Search&);
};

// Tries those that apply, in their order.
template <class Search, size_t Count>
void tryAll(const Candidate<Search> (&candidates)[Count], Search& search) {
  for (const Candidate<Search>& each : candidates) {
    if (!each.applies(search)) continue;
    search.trying = each.name;
    each.make(search);
  }
}

// The name of a plan that a candidate made out of another one: "waves + local search".
std::string improvedBy(const std::string& made_by, const std::string& candidate);

// The best plan so far, and which candidate made it.
struct PlanSearch {
  const Problem& problem;
  const PolicyOptions& options;
  double lower_bound;
  std::optional<Plan> best = {};
  std::string made_by = {};
  const char* trying = "";  // a candidate
  bool gap_left = true;     // by the quick candidates

  const Cluster& cluster() const { return problem.cost().cluster(); }
  bool atBound() const { return within(0); }
  // Whether the plan so far is no more than this share above the bound.
  bool within(double share) const {
    return best && best->makespan <= lower_bound * (1 + 1e-9 + share);
  }
  // Few sequences and ranks: at most so many of them, multiplied.
  bool small(double limit) const;

  // Plans that end no earlier are not taken.
  double limit() const;

  void take(std::optional<Plan> plan);
  template <class Improve>
  void improve(const Improve& improved) {
    const double before = best->makespan;
    best = improved(std::move(*best));
    if (best->makespan < before) made_by = improvedBy(made_by, trying);
  }
  // The plan that was found, which this takes away.
  Plan result() &&;
};

// The plans of the other policies: `balanced` is never worse. Most of them need not be made to know
// that.
void tryBaselines(PlanSearch& search);

}  // namespace hdpcomm::planner
