#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/bound/bound.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/policies/policies.hpp"
#include "planner/simulate/simulator.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using planner::Cluster;
using planner::CostModel;
using planner::CostParams;
using planner::Load;
using planner::MemoryParams;
using planner::MicroBatch;
using planner::Plan;
using planner::PolicyOptions;
using planner::Problem;
using planner::Scope;

// The micro-batches of a plan as arrays, the columns of hdpcomm.plan.PlanTable:
// (index, rank_bounds, ranks, sequence_bounds, ids, lengths, offload_ratio, predicted_s): numpy
// arrays over the memory that the core filled; then `slices`. `all_ids`: the id of each sequence;
// empty: its position. `next_id`: of the first slice.
struct PlanColumns {
  PlanColumns(const Plan& plan, const std::vector<int64_t>& all_lengths,
              const std::vector<int64_t>& all_ids, int64_t next_id);
  py::tuple toTuple() &&;

  std::vector<int64_t> slices;  // of each the sequence, its first token and the one after its last

  std::vector<int64_t> index, rank_bounds, sequence_bounds, ids, lengths;
  std::vector<int32_t> ranks;
  std::vector<double> offload_ratio, predicted_s;
};

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

PlanColumns::PlanColumns(const Plan& plan, const std::vector<int64_t>& all_lengths,
                         const std::vector<int64_t>& all_ids, int64_t next_id) {
  const size_t rows = plan.micro_batches.size();
  for (auto* column : {&index, &rank_bounds, &sequence_bounds}) column->reserve(rows + 1);
  offload_ratio.reserve(rows);
  predicted_s.reserve(rows);
  rank_bounds.push_back(0);
  sequence_bounds.push_back(0);
  for (const MicroBatch& batch : plan.micro_batches) {
    rank_bounds.push_back(rank_bounds.back() + static_cast<int64_t>(batch.ranks.size()));
    sequence_bounds.push_back(sequence_bounds.back() +
                              static_cast<int64_t>(batch.sequences.size()));
  }
  ranks.reserve(static_cast<size_t>(rank_bounds.back()));
  ids.reserve(static_cast<size_t>(sequence_bounds.back()));
  lengths.reserve(static_cast<size_t>(sequence_bounds.back()));
  for (const MicroBatch& batch : plan.micro_batches) {
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

Load makeLoad(const std::vector<int64_t>& lengths) {
  Load load;
  for (const int64_t length : lengths) load.add(length);
  return load;
}

// `given`: values of all three parts of a cost model by name; those that are left out keep their
// defaults.
CostModel costModelOf(const py::dict& given) {
  CostParams cost;
  MemoryParams memory;
  Cluster cluster;
  py::dict unknown = given.attr("copy")();
  const auto set = [&](const char* name, auto& value) {
    if (!given.contains(name)) return;
    value = given[name].cast<std::decay_t<decltype(value)>>();
    unknown.attr("pop")(name);
  };
  set("attention", cost.attention);
  set("piece", cost.piece);
  set("linear", cost.linear);
  set("fixed", cost.fixed);
  set("ring_step", cost.ring_step);
  set("kv_intra", cost.kv_intra);
  set("kv_domain", cost.kv_domain);
  set("kv_inter", cost.kv_inter);
  set("latency_intra", cost.latency_intra);
  set("latency_domain", cost.latency_domain);
  set("latency_inter", cost.latency_inter);
  set("forward", cost.forward);
  set("forward_transfer", cost.forward_transfer);
  set("put_off", cost.put_off);
  set("key_limit", cost.key_limit);
  set("limited", cost.limited);
  set("capacity", memory.capacity);
  set("offloadable", memory.offloadable);
  set("host_tokens", memory.host_tokens);
  set("copy", memory.copy);
  set("kept_copy", memory.kept_copy);
  set("kept_back", memory.kept_back);
  set("kept", memory.kept);
  set("kept_offloaded", memory.kept_offloaded);
  set("ranks", cluster.ranks);
  set("ranks_per_node", cluster.ranks_per_node);
  set("ranks_per_domain", cluster.ranks_per_domain);
  set("pipeline", cluster.pipeline);
  set("chunks", cluster.chunks);
  set("nics", cluster.nics);
  set("split", cluster.split);
  set("slices", cluster.slices);
  set("speeds", cluster.speeds);
  set("stage_work", cluster.stage_work);
  if (!unknown.empty()) {
    throwInvalidUsage("a cost model was given " + py::str(py::list(unknown)).cast<std::string>() +
                      ", expected values of CostParams, MemoryParams and Cluster");
  }
  return {cost, memory, cluster};
}

// (item, rows, starts): the segments of trees that may run in slices.
using TreeRows = std::vector<std::tuple<int32_t, std::vector<int64_t>, std::vector<int64_t>>>;

// (columns, makespan, lower bound, idle share, micro-batches that wait in a queue, pools of ranks,
// the candidate that made the plan).
// `next_id`: of the first slice.
py::tuple solveToTuple(const CostModel& cost, std::vector<int64_t> lengths,
                       const std::string& policy, int64_t context, int context_ranks,
                       std::vector<double> squares, const std::vector<int64_t>& ids, bool queue,
                       int64_t next_id, const TreeRows& trees) {
  std::optional<PlanColumns> columns;
  double lower_bound = 0;
  double makespan = 0;
  double idle_share = 0;
  int queued = 0;
  int pools = 1;
  std::string made_by;
  {
    GilRelease release;
    std::map<int32_t, planner::Segments> segments;
    for (const auto& [item, rows, starts] : trees) segments[item] = {rows, starts};
    const Problem problem(std::move(lengths), cost, std::move(squares), segments);
    lower_bound = planner::lowerBound(problem);
    const PolicyOptions options{context, context_ranks};
    Plan plan = planner::planPolicy(problem, policy, options, lower_bound);
    if (queue && problem.count() > 0) {
      planner::QueuedPlan found = planner::planQueue(problem, options, std::move(plan));
      plan = std::move(found.plan);
      queued = found.queued;
      pools = found.pools;
    }
    columns.emplace(plan, problem.lengths(), ids, next_id);
    makespan = plan.makespan;
    idle_share = plan.idle_share;
    made_by = plan.made_by;
  }
  return py::make_tuple(std::move(*columns).toTuple(), makespan, lower_bound, idle_share, queued,
                        pools, made_by);
}

// The simulator counts on ranks that the cluster has.
void checkRanks(const std::vector<int32_t>& ranks, int num_ranks) {
  if (ranks.empty()) throwInvalidUsage("a micro-batch to simulate has no ranks");
  for (const int32_t rank : ranks) {
    if (rank < 0 || rank >= num_ranks) {
      throwInvalidUsage("a micro-batch to simulate has rank " + std::to_string(rank) +
                        ", expected 0 to " + std::to_string(num_ranks - 1));
    }
  }
}

py::array_t<double> toArray(const std::vector<double>& values) {
  return py::array_t<double>(static_cast<py::ssize_t>(values.size()), values.data());
}

template <typename T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::span<const T> view(const Column<T>& column) {
  return {column.data(), static_cast<size_t>(column.size())};
}

// Row `row` of a column. Throws InvalidUsage for one that does not lie in it.
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

// Runs the micro-batches of a table (the columns that PlanColumns gives). `squares`: of each of its
// sequences and slices in turn. `slices`: (row, first token, token after the last one, whether
// another one follows) of those that are a slice.
py::dict simulateToDict(const CostModel& cost, const py::tuple& table,
                        const Column<double>& of_sequences,
                        const std::vector<std::tuple<size_t, int64_t, int64_t, bool>>& slices) {
  const auto rank_bounds = table[1].cast<Column<int64_t>>();
  const auto all_ranks = table[2].cast<Column<int32_t>>();
  const auto sequence_bounds = table[3].cast<Column<int64_t>>();
  const auto all_lengths = table[5].cast<Column<int64_t>>();
  const auto offload_ratio = table[6].cast<Column<double>>();
  const auto rows = static_cast<size_t>(offload_ratio.size());
  const auto bounds = {view(rank_bounds), view(sequence_bounds)};
  for (const auto& each : bounds) {
    if (each.size() != rows + 1) {
      throwInvalidUsage("the columns of a plan's table have lengths that do not belong together");
    }
  }
  std::vector<double> squares(of_sequences.data(), of_sequences.data() + of_sequences.size());
  planner::SimulatedStep step;
  {
    GilRelease release;
    std::vector<int64_t> lengths;
    Plan plan;
    for (size_t row = 0; row < rows; ++row) {
      MicroBatch batch;
      const auto ranks = part(view(all_ranks), view(rank_bounds), row);
      batch.ranks.assign(ranks.begin(), ranks.end());
      checkRanks(batch.ranks, cost.cluster().ranks);
      batch.offload = view(offload_ratio)[row];
      for (const int64_t length : part(view(all_lengths), view(sequence_bounds), row)) {
        batch.sequences.push_back(static_cast<int32_t>(lengths.size()));
        lengths.push_back(length);
      }
      plan.micro_batches.push_back(std::move(batch));
    }
    if (squares.size() != lengths.size()) {
      throwInvalidUsage(std::to_string(squares.size()) + " squares were given for " +
                        std::to_string(lengths.size()) +
                        " sequences and slices to simulate: give one for each");
    }
    for (const auto& [row, first, end, more] : slices) {
      if (row >= plan.micro_batches.size() || first < 0 || end <= first ||
          plan.micro_batches[row].sequences.size() != 1) {
        throwInvalidUsage("a slice to simulate is tokens " + std::to_string(first) + " to " +
                          std::to_string(end) + " in micro-batch " + std::to_string(row) +
                          ", which cannot be");
      }
      MicroBatch& batch = plan.micro_batches[row];
      batch.slice = {first, end, more, squares[batch.sequences.front()]};
    }
    const Problem problem(std::move(lengths), cost, std::move(squares));
    step = planner::simulate(problem, plan);
  }
  const auto count = static_cast<py::ssize_t>(step.spans.size());
  py::array_t<int32_t> which({count, py::ssize_t{3}});
  py::array_t<double> times({count, py::ssize_t{2}});
  py::array_t<int32_t> alone(count);
  auto which_rows = which.mutable_unchecked<2>();
  auto time_rows = times.mutable_unchecked<2>();
  auto alone_rows = alone.mutable_unchecked<1>();
  for (py::ssize_t i = 0; i < count; ++i) {
    which_rows(i, 0) = step.spans[i].micro_batch;
    which_rows(i, 1) = step.spans[i].stage;
    which_rows(i, 2) = step.spans[i].weights_of >= 0 ? 2 : step.spans[i].backward;
    alone_rows(i) = step.spans[i].weights_of;
    time_rows(i, 0) = step.spans[i].start;
    time_rows(i, 1) = step.spans[i].end;
  }
  py::dict result;
  result["makespan"] = step.makespan;
  result["which"] = which;
  result["times"] = times;
  result["alone"] = alone;
  result["busy"] = toArray(step.busy);
  result["exposed"] = toArray(step.exposed);
  result["stalled"] = toArray(step.stalled);
  result["end"] = toArray(step.end);
  result["peak_tokens"] = toArray(step.peak_tokens);
  return result;
}

}  // namespace

void bindPlanner(py::module_& module) {
  py::class_<CostModel>(module, "CostModel")
      .def(py::init(&costModelOf), py::arg("values"))
      .def(
          "seconds",
          [](const CostModel& cost, const std::vector<int64_t>& lengths, int size, bool one_node,
             bool one_domain) {
            const Scope far = one_domain ? Scope::kDomain : Scope::kCluster;
            return cost.seconds(makeLoad(lengths), size, one_node ? Scope::kNode : far);
          },
          py::arg("lengths"), py::arg("size"), py::arg("one_node"), py::arg("one_domain") = false)
      .def("token_limit", &CostModel::tokenLimit, py::arg("ratio"));
  module.def("solve", &solveToTuple, py::arg("cost"), py::arg("lengths"), py::arg("policy"),
             py::arg("context"), py::arg("context_ranks"),
             py::arg("squares") = std::vector<double>(), py::arg("ids") = std::vector<int64_t>(),
             py::arg("queue") = false, py::arg("next_id") = 0, py::arg("trees") = TreeRows());
  module.def(
      "lower_bound",
      [](const CostModel& cost, std::vector<int64_t> lengths, std::vector<double> squares) {
        GilRelease release;
        return planner::lowerBound(Problem(std::move(lengths), cost, std::move(squares)));
      },
      py::arg("cost"), py::arg("lengths"), py::arg("squares") = std::vector<double>());
  module.def("simulate", &simulateToDict, py::arg("cost"), py::arg("table"), py::arg("squares"),
             py::arg("slices") = std::vector<std::tuple<size_t, int64_t, int64_t, bool>>());
}

}  // namespace hdpcomm
