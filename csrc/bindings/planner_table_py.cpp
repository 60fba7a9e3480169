#include "bindings/planner_table_py.hpp"

#include <memory>
#include <string>

#include "base/error.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// A numpy array over the memory of a vector, which it owns from then on.
template <typename T>
py::array owned(std::vector<T>&& values) {
  auto held = std::make_unique<std::vector<T>>(std::move(values));
  const auto size = static_cast<py::ssize_t>(held->size());
  const T* const data = held->data();
  const py::capsule owner(held.get(),
                          [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
  held.release();
  return py::array_t<T>(size, data, owner);
}

template <typename T>
std::span<const T> column(const py::tuple& arrays, size_t place) {
  const py::object array = arrays[place];
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    throwInvalidUsage("column " + std::to_string(place) + " of a plan's table is " +
                      std::string(py::repr(array)).substr(0, 80) +
                      ", expected a contiguous array of " +
                      std::string(py::str(py::dtype::of<T>())));
  }
  const auto values = py::cast<py::array_t<T, py::array::c_style>>(array);
  if (values.ndim() != 1) throwInvalidUsage("a column of a plan's table has no single dimension");
  return {values.data(), static_cast<size_t>(values.size())};
}

template <typename T>
std::span<const T> part(std::span<const T> values, std::span<const int64_t> bounds, size_t row) {
  const int64_t first = bounds[row];
  const int64_t last = bounds[row + 1];
  if (first < 0 || last < first || static_cast<uint64_t>(last) > values.size()) {
    throwInvalidUsage("row " + std::to_string(row) + " of a plan's table lies at " +
                      std::to_string(first) + " to " + std::to_string(last) + " of " +
                      std::to_string(values.size()) + " entries: the table is damaged");
  }
  return values.subspan(static_cast<size_t>(first), static_cast<size_t>(last - first));
}

}  // namespace

PlanColumns::PlanColumns(const planner::Plan& plan, const std::vector<int64_t>& all_lengths,
                         const std::vector<int64_t>& all_ids, int64_t next_id) {
  const size_t rows = plan.micro_batches.size();
  for (auto* column : {&index, &rank_bounds, &sequence_bounds}) column->reserve(rows + 1);
  offload_ratio.reserve(rows);
  predicted_s.reserve(rows);
  rank_bounds.push_back(0);
  sequence_bounds.push_back(0);
  for (const planner::MicroBatch& batch : plan.micro_batches) {
    rank_bounds.push_back(rank_bounds.back() + static_cast<int64_t>(batch.ranks.size()));
    sequence_bounds.push_back(sequence_bounds.back() +
                              static_cast<int64_t>(batch.sequences.size()));
  }
  ranks.reserve(static_cast<size_t>(rank_bounds.back()));
  ids.reserve(static_cast<size_t>(sequence_bounds.back()));
  lengths.reserve(static_cast<size_t>(sequence_bounds.back()));
  for (const planner::MicroBatch& batch : plan.micro_batches) {
    index.push_back(static_cast<int64_t>(index.size()));
    ranks.insert(ranks.end(), batch.ranks.begin(), batch.ranks.end());
    for (const int32_t place : batch.sequences) {
      ids.push_back(all_ids.empty() ? place : all_ids.at(static_cast<size_t>(place)));
      lengths.push_back(all_lengths[static_cast<size_t>(place)]);
    }
    if (batch.slice.some()) {
      slices.insert(slices.end(), {ids.back(), batch.slice.first, batch.slice.end});
      ids.back() = next_id++;
      lengths.back() = batch.slice.end - batch.slice.first;
    }
    offload_ratio.push_back(batch.offload);
    predicted_s.push_back(batch.predicted_s);
  }
}

py::tuple PlanColumns::toTuple() && {
  return py::make_tuple(
      owned(std::move(index)), owned(std::move(rank_bounds)), owned(std::move(ranks)),
      owned(std::move(sequence_bounds)), owned(std::move(ids)), owned(std::move(lengths)),
      owned(std::move(offload_ratio)), owned(std::move(predicted_s)), owned(std::move(slices)));
}

TableView::TableView(const py::tuple& arrays) : owner_(arrays) {
  constexpr size_t kColumns = 8;
  if (arrays.size() != kColumns) {
    throwInvalidUsage("a plan's table has " + std::to_string(arrays.size()) +
                      " columns, expected " + std::to_string(kColumns));
  }
  rows_ = column<int64_t>(arrays, 0).size();
  rank_bounds_ = column<int64_t>(arrays, 1);
  ranks_ = column<int32_t>(arrays, 2);
  sequence_bounds_ = column<int64_t>(arrays, 3);
  lengths_ = column<int64_t>(arrays, 5);
  offload_ratio_ = column<double>(arrays, 6);
  if (rank_bounds_.size() != rows_ + 1 || sequence_bounds_.size() != rows_ + 1 ||
      offload_ratio_.size() != rows_ || column<double>(arrays, 7).size() != rows_ ||
      column<int64_t>(arrays, 4).size() != lengths_.size()) {
    throwInvalidUsage("the columns of a plan's table have lengths that do not belong together");
  }
}

std::span<const int32_t> TableView::ranks(size_t row) const {
  return part(ranks_, rank_bounds_, row);
}

std::span<const int64_t> TableView::lengths(size_t row) const {
  return part(lengths_, sequence_bounds_, row);
}

}  // namespace hdpcomm
