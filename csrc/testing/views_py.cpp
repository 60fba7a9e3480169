// Values of the core that the product does not ask for, and tests compare.
#include <pybind11/stl.h>

#include "bindings/rooms.hpp"
#include "comm/stream/stream_engine.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"
#include "testing/module.hpp"
#include "transport/host/shm/layout.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {

void bindViews(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
  // Where the channel of an ordered pair of ranks lies in a segment.
  module.def(
      "channel_offset",
      [](uint32_t num_ranks, uint32_t payload_bytes, int src, int dst) {
        return shm::Layout{num_ranks, payload_bytes}.channelOffset(src, dst);
      },
      py::arg("num_ranks"), py::arg("payload_bytes"), py::arg("src"), py::arg("dst"));
  module.def("arena_bytes", &StreamEngine::arenaBytes, py::arg("engine"));
  // The engine's lock may be held by a thread that is in a call of NCCL.
  module.def("scratch_bytes", &StreamEngine::scratchBytes, py::arg("engine"), Unlocked());
  module.def(
      "min_ranks",
      [](const planner::CostModel& cost, int64_t length) {
        planner::Load load;
        load.add(length);
        return cost.minRanks(load);
      },
      py::arg("cost"), py::arg("length"));
  module.def(
      "max_offload",
      [](const planner::CostModel& cost, const std::vector<int64_t>& lengths) {
        planner::Load load;
        for (const int64_t length : lengths) load.add(length);
        return cost.maxOffload(load);
      },
      py::arg("cost"), py::arg("lengths"));
  module.def(
      "ring_order",
      [](const std::vector<int32_t>& ranks, int ranks_per_node, int nics, int ranks_per_domain) {
        planner::Cluster cluster;
        cluster.ranks_per_node = ranks_per_node;
        cluster.nics = nics;
        cluster.ranks_per_domain = ranks_per_domain;
        for (const int32_t rank : ranks) cluster.ranks = std::max(cluster.ranks, rank + 1);
        return planner::ringOrder(ranks, cluster);
      },
      py::arg("ranks"), py::arg("ranks_per_node") = 1, py::arg("nics") = 0,
      py::arg("ranks_per_domain") = 0);
}

}  // namespace hdpcomm::testing
