// The micro-batches of a plan as arrays, the columns of hdpcomm.plan.PlanTable.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <vector>

#include "planner/model/plan.hpp"

namespace hdpcomm {

// (index, rank_bounds, ranks, sequence_bounds, ids, lengths, offload_ratio, predicted_s): numpy
// arrays over the memory that the core filled; then `slices`. `all_ids`: the id of each sequence;
// empty: its position. `next_id`: of the first slice.
struct PlanColumns {
  PlanColumns(const planner::Plan& plan, const std::vector<int64_t>& all_lengths,
              const std::vector<int64_t>& all_ids, int64_t next_id);
  pybind11::tuple toTuple() &&;

  std::vector<int64_t> slices;  // of each the sequence, its first token and the one after its last

  std::vector<int64_t> index, rank_bounds, sequence_bounds, ids, lengths;
  std::vector<int32_t> ranks;
  std::vector<double> offload_ratio, predicted_s;
};

}  // namespace hdpcomm
