#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "hdpcomm/base/error.hpp"
#include "hdpcomm/planner/plan.hpp"
#include "rooms.hpp"

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
  if (policy == "balanced") return planner::planBalanced(problem, lower_bound);
  throwInvalidUsage("policy is '" + policy + "', expected static, naive or balanced");
}

py::tuple toTuple(const std::vector<int32_t>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = py::int_(values[i]);
  return result;
}

py::dict toDict(const Plan& plan, double lower_bound) {
  py::list batches;
  for (const MicroBatch& batch : plan.micro_batches) {
    batches.append(py::make_tuple(toTuple(batch.ranks), toTuple(batch.sequences), batch.offload,
                                  batch.seconds));
  }
  py::dict result;
  result["micro_batches"] = std::move(batches);
  result["makespan"] = plan.makespan;
  result["idle_share"] = plan.idle_share;
  result["lower_bound"] = lower_bound;
  return result;
}

py::dict solveToDict(const CostModel& cost, std::vector<int64_t> lengths, const std::string& policy,
                     int64_t context, int context_ranks) {
  Plan plan;
  double lower_bound = 0;
  {
    py::gil_scoped_release release;
    const Problem problem(std::move(lengths), cost);
    lower_bound = planner::lowerBound(problem);
    plan = solve(problem, policy, PolicyOptions{context, context_ranks}, lower_bound);
  }
  return toDict(plan, lower_bound);
}

}  // namespace

void bindPlanner(py::module_& module) {
  py::class_<CostModel>(module, "CostModel")
      .def(py::init([](double attention, double piece, double linear, double fixed,
                       double ring_step, double kv_intra, double kv_inter, double latency_intra,
                       double latency_inter, int64_t capacity, double offloadable, double copy,
                       double forward, int ranks, int ranks_per_node, int pipeline) {
             return CostModel(CostParams{attention, piece, linear, fixed, ring_step, kv_intra,
                                         kv_inter, latency_intra, latency_inter},
                              MemoryParams{capacity, offloadable, copy, forward},
                              Cluster{ranks, ranks_per_node, pipeline});
           }),
           py::kw_only(), py::arg("attention"), py::arg("piece"), py::arg("linear"),
           py::arg("fixed"), py::arg("ring_step"), py::arg("kv_intra"), py::arg("kv_inter"),
           py::arg("latency_intra"), py::arg("latency_inter"), py::arg("capacity"),
           py::arg("offloadable"), py::arg("copy"), py::arg("forward"), py::arg("ranks"),
           py::arg("ranks_per_node"), py::arg("pipeline"))
      .def(
          "seconds",
          [](const CostModel& cost, const std::vector<int64_t>& lengths, int size, bool one_node) {
            return cost.seconds(makeLoad(lengths), size, one_node);
          },
          py::arg("lengths"), py::arg("size"), py::arg("one_node"))
      .def(
          "max_offload",
          [](const CostModel& cost, const std::vector<int64_t>& lengths) {
            return cost.maxOffload(makeLoad(lengths));
          },
          py::arg("lengths"))
      .def("token_limit", &CostModel::tokenLimit, py::arg("ratio"))
      .def("min_ranks", &CostModel::minRanks, py::arg("length"));
  module.def("solve", &solveToDict, py::arg("cost"), py::arg("lengths"), py::arg("policy"),
             py::arg("context"), py::arg("context_ranks"));
  module.def(
      "lower_bound",
      [](const CostModel& cost, std::vector<int64_t> lengths) {
        py::gil_scoped_release release;
        return planner::lowerBound(Problem(std::move(lengths), cost));
      },
      py::arg("cost"), py::arg("lengths"));
  module.def(
      "ring_order", [](const std::vector<int32_t>& ranks) { return planner::ringOrder(ranks); },
      py::arg("ranks"));
}

}  // namespace hdpcomm
