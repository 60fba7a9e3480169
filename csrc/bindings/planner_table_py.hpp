// The micro-batches of a plan as arrays, the columns of hdpcomm.plan.PlanTable.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <span>
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

// The same arrays on their way back. No row reaches outside them, whatever they hold; other numbers
// are as they were given.
class TableView {
 public:
  // Throws InvalidUsage for arrays of other types or lengths.
  explicit TableView(const pybind11::tuple& arrays);

  size_t size() const noexcept { return rows_; }
  double offloadRatio(size_t row) const noexcept { return offload_ratio_[row]; }
  // These throw InvalidUsage for bounds that fall or lie outside.
  std::span<const int32_t> ranks(size_t row) const;
  std::span<const int64_t> lengths(size_t row) const;

 private:
  size_t rows_ = 0;
  std::span<const int64_t> rank_bounds_, sequence_bounds_, lengths_;
  std::span<const int32_t> ranks_;
  std::span<const double> offload_ratio_;
  pybind11::tuple owner_;  // keeps the memory
};

}  // namespace hdpcomm
