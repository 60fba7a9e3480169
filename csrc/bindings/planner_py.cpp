#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "planner/plan.hpp"
#include "planner/simulator.hpp"

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

Load makeLoad(const std::vector<int64_t>& lengths) {
  Load load;
  for (const int64_t length : lengths) load.add(length);
  return load;
}

Plan solve(const Problem& problem, const std::string& policy, const PolicyOptions& options,
           double lower_bound) {
  if (policy == "static") return planner::planStatic(problem, options);
  if (policy == "naive") return planner::planNaive(problem);
  if (policy == "balanced" || policy == "pipeline") {
    return planner::planBalanced(problem, options, lower_bound);
  }
  if (policy == "pow2") return planner::planPow2(problem);
  throwInvalidUsage("policy is '" + policy +
                    "', expected static, naive, balanced, pipeline or pow2");
}

// The collector need not look at objects that lie in no circle: a million of them would take it
// most of a second, again and again.
void untrack(const py::object& object) {
  if (PyObject_GC_IsTracked(object.ptr()) != 0) PyObject_GC_UnTrack(object.ptr());
}

// Makes objects of a frozen, slotted dataclass: fills the slots without the Python-level __init__,
// which would take most of the planning time.
class SlotFiller {
 public:
  SlotFiller(const py::object& cls, std::initializer_list<const char*> names)
      : type_(reinterpret_cast<PyTypeObject*>(cls.ptr())) {
    for (const char* name : names) names_.push_back(py::str(name));
  }

  template <typename... Values>
  py::object make(const Values&... values) const {
    auto object = py::reinterpret_steal<py::object>(type_->tp_alloc(type_, 0));
    if (!object) throw py::error_already_set();
    size_t field = 0;
    (set(object, field++, values), ...);
    untrack(object);
    return object;
  }

 private:
  void set(const py::object& object, size_t field, const py::object& value) const {
    if (PyObject_GenericSetAttr(object.ptr(), names_[field].ptr(), value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }

  PyTypeObject* type_;
  std::vector<py::str> names_;
};

// Keeps Python's garbage collector off while many objects are made, none of which is garbage.
class CollectorPause {
 public:
  CollectorPause() : was_on_(PyGC_Disable() == 1) {}
  ~CollectorPause() {
    if (was_on_) PyGC_Enable();
  }
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;

 private:
  bool was_on_;
};

// `ids`: the id of each sequence in the step; empty: its position.
py::tuple makeBatches(const Plan& plan, const std::vector<int64_t>& lengths,
                      const std::vector<int64_t>& ids, const py::object& batch_class,
                      const py::object& sequence_class) {
  const CollectorPause pause;
  const SlotFiller make_sequence(sequence_class, {"id", "length"});
  const SlotFiller make_batch(batch_class,
                              {"index", "ranks", "sequences", "offload_ratio", "predicted_s"});
  std::vector<py::int_> ranks;  // shared: a rank appears in many groups
  const auto rankObject = [&](int32_t rank) -> const py::int_& {
    while (ranks.size() <= static_cast<size_t>(rank)) {
      ranks.push_back(py::int_(static_cast<int64_t>(ranks.size())));
    }
    return ranks[rank];
  };
  py::tuple batches(plan.micro_batches.size());
  for (size_t i = 0; i < plan.micro_batches.size(); ++i) {
    const MicroBatch& batch = plan.micro_batches[i];
    py::tuple group(batch.ranks.size());
    for (size_t k = 0; k < batch.ranks.size(); ++k) group[k] = rankObject(batch.ranks[k]);
    py::tuple sequences(batch.sequences.size());
    for (size_t k = 0; k < batch.sequences.size(); ++k) {
      const int32_t place = batch.sequences[k];
      const int64_t id = ids.empty() ? place : ids.at(place);
      sequences[k] = make_sequence.make(py::int_(id), py::int_(lengths[place]));
    }
    untrack(group);
    untrack(sequences);
    batches[i] = make_batch.make(py::int_(i), group, sequences, py::float_(batch.offload),
                                 py::float_(batch.predicted_s));
  }
  return batches;
}

// (micro-batches, makespan, lower bound, idle share)
py::tuple solveToTuple(const CostModel& cost, std::vector<int64_t> lengths,
                       const std::string& policy, int64_t context, int context_ranks,
                       const py::object& batch_class, const py::object& sequence_class,
                       std::vector<double> squares, const std::vector<int64_t>& ids) {
  Plan plan;
  double lower_bound = 0;
  std::optional<Problem> problem;
  {
    py::gil_scoped_release release;
    problem.emplace(std::move(lengths), cost, std::move(squares));
    lower_bound = planner::lowerBound(*problem);
    plan = solve(*problem, policy, PolicyOptions{context, context_ranks}, lower_bound);
  }
  return py::make_tuple(makeBatches(plan, problem->lengths(), ids, batch_class, sequence_class),
                        plan.makespan, lower_bound, plan.idle_share);
}

py::array_t<double> toArray(const std::vector<double>& values) {
  return py::array_t<double>(static_cast<py::ssize_t>(values.size()), values.data());
}

// Runs micro-batches given as (ranks, lengths, offload ratio, squares of the lengths).
py::dict simulateToDict(const CostModel& cost,
                        const std::vector<std::tuple<std::vector<int32_t>, std::vector<int64_t>,
                                                     double, std::vector<double>>>& batches) {
  planner::SimulatedStep step;
  {
    py::gil_scoped_release release;
    std::vector<int64_t> lengths;
    std::vector<double> squares;
    Plan plan;
    for (const auto& [ranks, own_lengths, offload, own_squares] : batches) {
      MicroBatch batch;
      batch.ranks = ranks;
      batch.offload = offload;
      for (const int64_t length : own_lengths) {
        batch.sequences.push_back(static_cast<int32_t>(lengths.size()));
        lengths.push_back(length);
      }
      squares.insert(squares.end(), own_squares.begin(), own_squares.end());
      plan.micro_batches.push_back(std::move(batch));
    }
    const Problem problem(std::move(lengths), cost, std::move(squares));
    step = planner::simulate(problem, plan);
  }
  const auto count = static_cast<py::ssize_t>(step.spans.size());
  py::array_t<int32_t> which({count, py::ssize_t{3}});
  py::array_t<double> times({count, py::ssize_t{2}});
  auto which_rows = which.mutable_unchecked<2>();
  auto time_rows = times.mutable_unchecked<2>();
  for (py::ssize_t i = 0; i < count; ++i) {
    which_rows(i, 0) = step.spans[i].micro_batch;
    which_rows(i, 1) = step.spans[i].stage;
    which_rows(i, 2) = step.spans[i].backward;
    time_rows(i, 0) = step.spans[i].start;
    time_rows(i, 1) = step.spans[i].end;
  }
  py::dict result;
  result["makespan"] = step.makespan;
  result["which"] = which;
  result["times"] = times;
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
      .def(
          py::init([](double attention, double piece, double linear, double fixed, double ring_step,
                      double kv_intra, double kv_inter, double latency_intra, double latency_inter,
                      double forward, double forward_transfer, int64_t capacity, double offloadable,
                      double host_tokens, double copy, int ranks, int ranks_per_node, int pipeline,
                      int chunks, std::vector<double> speeds) {
            return CostModel(
                CostParams{attention, piece, linear, fixed, ring_step, kv_intra, kv_inter,
                           latency_intra, latency_inter, forward, forward_transfer},
                MemoryParams{capacity, offloadable, host_tokens, copy},
                Cluster{ranks, ranks_per_node, pipeline, chunks, std::move(speeds)});
          }),
          py::kw_only(), py::arg("attention"), py::arg("piece"), py::arg("linear"),
          py::arg("fixed"), py::arg("ring_step"), py::arg("kv_intra"), py::arg("kv_inter"),
          py::arg("latency_intra"), py::arg("latency_inter"), py::arg("forward"),
          py::arg("forward_transfer"), py::arg("capacity"), py::arg("offloadable"),
          py::arg("host_tokens"), py::arg("copy"), py::arg("ranks"), py::arg("ranks_per_node"),
          py::arg("pipeline"), py::arg("chunks") = 1, py::arg("speeds") = std::vector<double>())
      .def(
          "seconds",
          [](const CostModel& cost, const std::vector<int64_t>& lengths, int size, bool one_node) {
            return cost.seconds(makeLoad(lengths), size, one_node);
          },
          py::arg("lengths"), py::arg("size"), py::arg("one_node"))
      .def("token_limit", &CostModel::tokenLimit, py::arg("ratio"));
  module.def("solve", &solveToTuple, py::arg("cost"), py::arg("lengths"), py::arg("policy"),
             py::arg("context"), py::arg("context_ranks"), py::arg("batch_class"),
             py::arg("sequence_class"), py::arg("squares") = std::vector<double>(),
             py::arg("ids") = std::vector<int64_t>());
  module.def(
      "lower_bound",
      [](const CostModel& cost, std::vector<int64_t> lengths, std::vector<double> squares) {
        py::gil_scoped_release release;
        return planner::lowerBound(Problem(std::move(lengths), cost, std::move(squares)));
      },
      py::arg("cost"), py::arg("lengths"), py::arg("squares") = std::vector<double>());
  module.def("simulate", &simulateToDict, py::arg("cost"), py::arg("batches"));
}

}  // namespace hdpcomm
