// Parts of the planner's searches, to test what they leave out.
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/flat/block_packer.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/round_queue.hpp"
#include "planner/pipeline/wave_planner.hpp"
#include "planner/simulate/finish_plan.hpp"
#include "testing/module.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

using planner::CostModel;
using planner::MicroBatch;
using planner::Problem;

using Batches = std::vector<std::pair<std::vector<int32_t>, std::vector<int32_t>>>;

constexpr double kNever = std::numeric_limits<double>::infinity();

// In the order of these pairs of ranks and sequences.
std::vector<MicroBatch> microBatches(const Batches& pairs) {
  std::vector<MicroBatch> batches;
  for (const auto& [ranks, sequences] : pairs) {
    MicroBatch batch;
    batch.ranks = ranks;
    batch.sequences = sequences;
    batch.start = static_cast<double>(batches.size());
    batches.push_back(std::move(batch));
  }
  return batches;
}

// For each turn (passed, later) which entry comes next once so many are passed over; that one is
// then so much later, or gone if `later` is below 0.
std::vector<int32_t> entriesInTurn(const std::vector<double>& times,
                                   const std::vector<std::pair<int, double>>& turns) {
  std::vector<planner::RoundQueue::Entry> entries;
  for (const double time : times) entries.emplace_back(time, static_cast<int32_t>(entries.size()));
  planner::RoundQueue queue(std::move(entries));
  std::vector<int32_t> found;
  for (const auto& [passed, later] : turns) {
    std::vector<planner::RoundQueue::Entry> taken;
    for (int i = 0; i < passed && !queue.empty(); ++i) {
      taken.push_back(queue.top());
      queue.pop();
    }
    if (!queue.empty()) {
      const auto [time, id] = queue.top();
      found.push_back(id);
      later < 0 ? queue.pop() : queue.replaceTop({time + later, id});
    }
    for (auto entry = taken.rbegin(); entry != taken.rend(); ++entry) queue.putBack(*entry);
  }
  return found;
}

py::dict packBlocks(const CostModel& cost, std::vector<int64_t> lengths, double target) {
  const Problem problem(std::move(lengths), cost);
  std::vector<planner::Job> jobs = planner::makeJobs(problem);
  planner::BlockPacker packer(problem, jobs);
  py::dict found;
  found["makespan"] = packer.run(target);
  found["looked"] = packer.looked();
  return found;
}

// The number of the arrangement of each shape (waves, ramps, spread), and its micro-batches.
std::vector<std::pair<uint64_t, Batches>> arrangeWaves(
    const CostModel& cost, std::vector<int64_t> lengths,
    const std::vector<std::tuple<int, double, bool>>& shapes) {
  const Problem problem(std::move(lengths), cost);
  planner::WavePlanner waves(problem);
  std::vector<std::pair<uint64_t, Batches>> found;
  for (const auto& [count, ramps, spread] : shapes) {
    planner::Shape shape{count};
    shape.ramps = ramps;
    shape.spread = spread;
    if (!waves.arrange(shape, kNever, kNever) || !waves.deal()) continue;
    Batches batches;
    for (MicroBatch& batch : waves.plan()) {
      batches.emplace_back(std::move(batch.ranks), std::move(batch.sequences));
    }
    found.emplace_back(waves.arrangement(), std::move(batches));
  }
  return found;
}

}  // namespace

void bindSearches(py::module_& module) {
  module.def("entries_in_turn", &entriesInTurn, py::arg("times"), py::arg("turns"));
  module.def("pack_blocks", &packBlocks, py::arg("cost"), py::arg("lengths"), py::arg("target"));
  module.def("arrange_waves", &arrangeWaves, py::arg("cost"), py::arg("lengths"),
             py::arg("shapes"));
  module.def(
      "makespan_of",
      [](const CostModel& cost, std::vector<int64_t> lengths, const Batches& batches,
         double limit) {
        const Problem problem(std::move(lengths), cost);
        return planner::finishPlan(problem, microBatches(batches), limit).makespan;
      },
      py::arg("cost"), py::arg("lengths"), py::arg("batches"), py::arg("limit") = kNever);
}

}  // namespace hdpcomm::testing
