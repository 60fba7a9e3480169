// Plans of large clusters out of the plan of a part of them. Where there are many sequences, those
// that follow each other by length are about as long as each other: with one of them each, equal
// parts of the cluster can run the same plan.
#pragma once

#include <functional>
#include <optional>
#include <span>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

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
