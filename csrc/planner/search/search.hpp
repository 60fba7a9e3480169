// What searches for plans share: tables of the ways in which they make plans, local search, and
// plans of large clusters out of the plan of a part of them.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "planner/baselines/baselines.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// A way in which a search makes plans; the plan says which one made it. `applies` is asked when the
// candidates before it have been tried.
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

// Improves a plan of few micro-batches without slices by simulated annealing, if that finds a
// shorter one.
Plan refine(const Problem& problem, Plan plan, double lower_bound);

// Where there are many sequences, those that follow each other by length are about as long as each
// other: with one of them each, equal parts of the cluster can run the same plan.
//
// An equal part of the ranks, at least so many, with every n-th sequence by length from the longest
// one on. None where there is no such part (as below), or the longest one does not fit into it.
std::optional<Problem> sampleOf(const Problem& problem, int ranks);

// The plan of the first part on each of so many parts. None where memory has no room for a copy, or
// a sequence cannot run in slices as another one does.
std::optional<Plan> copiesOf(const Problem& problem, int parts, const Plan& first);

// Copies of the best `plan_part(part, its bound)` of all sizes of parts, whole nodes and domains of
// so many ranks at least. A part has the longest one of the sequences that run at the same place of
// all parts, and the slowest ranks, so its plan takes longest. None where speeds differ and do not
// fall from rank to rank, and where no part is a fair one: its bound is above `bound`, that of the
// problem, by more than the share `fair`.
std::optional<Plan> planCopiedPart(const Problem& problem, double bound, double fair,
                                   std::span<const int> ranks_of_parts,
                                   const std::function<Plan(const Problem&, double)>& plan_part);

}  // namespace hdpcomm::planner
