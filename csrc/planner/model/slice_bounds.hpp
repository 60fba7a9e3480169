// Where a sequence is cut into slices.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Whether a sequence can run in several slices: it has no riders, and all its queries see what is
// before them; or it is a tree whose segments are known.
bool sliceable(const Problem& problem, int32_t sequence);

// How many times the first one `count` are together, each of which is `growth` times the one
// before.
double timesTheFirst(int count, double growth) noexcept;

// Where so many slices on so many ranks begin, and the length at last; of a tree, its tokens in
// depth-first order. They take about equal time, or each `growth` times that of the one before;
// more of them where memory asks for it. Empty where it has no room: a rank holds all slices of a
// sequence at a time, at most as many tokens as a full micro-batch for each device of its pipeline;
// or where that is more slices than the cluster allows.
std::vector<int64_t> sliceBounds(const Problem& problem, int32_t sequence, int size, int slices,
                                 double growth);

// Number k of the slices that begin at these bounds.
Slice sliceOf(const Problem& problem, int32_t sequence, const std::vector<int64_t>& bounds,
              size_t k);

}  // namespace hdpcomm::planner
