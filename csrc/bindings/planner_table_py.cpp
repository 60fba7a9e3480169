#include "bindings/planner_table_py.hpp"

#include <memory>

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

}  // namespace hdpcomm
