// Worlds of several hosts: frames for a carrier written in Python, and the world over them.
#include <pybind11/stl.h>

#include <numeric>

#include "bindings/collective_py.hpp"
#include "bindings/rooms.hpp"
#include "collective/cost.hpp"
#include "comm/host/world.hpp"
#include "testing/schedule_checker.hpp"
#include "transport/host/composite.hpp"
#include "transport/host/framed/frame_link.hpp"
#include "transport/host/shm/shm.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

py::memoryview viewOf(std::byte* data, size_t bytes) {
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes), false);
}

// Shared memory with the ranks of the own host, frames with all others.
std::shared_ptr<World> joinHosts(const std::shared_ptr<ShmSegment>& segment,
                                 const std::shared_ptr<FrameLink>& link,
                                 const std::vector<int>& host_of_rank, const std::string& name,
                                 double timeout_s, double joining_s, std::vector<int> pids) {
  const py::gil_scoped_release release;
  const int rank = link->rank();
  std::vector<int> members;
  std::vector<int> route;
  for (size_t i = 0; i < host_of_rank.size(); ++i) {
    const bool here = host_of_rank[i] == host_of_rank.at(static_cast<size_t>(rank));
    if (here) members.push_back(static_cast<int>(i));
    route.push_back(here ? 0 : 1);
  }
  auto local = makeShmTransport(segment, rank, members);
  shmWaitAllReady(*local, {joining_s, std::move(pids), checkSignals});
  link->setWake(local->waker());
  std::vector<std::unique_ptr<Transport>> parts;
  parts.push_back(std::move(local));
  parts.push_back(makeFramedTransport(link, name));
  return std::make_shared<World>(
      makeCompositeTransport(std::move(parts), std::move(route), "shm+" + name), timeout_s);
}

using LinkCosts = std::tuple<double, double, double, double>;  // as TransportCosts

TransportCosts costsOf(const LinkCosts& costs) {
  const auto& [alpha, message, beta, gamma] = costs;
  return {alpha, message, beta, gamma};
}

ScheduleRequest spreadRequest(int op, int algorithm, int rank, size_t count, size_t element_bytes,
                              int root, std::vector<int> nodes) {
  const int size = static_cast<int>(nodes.size());
  ScheduleRequest request = requestOf(op, algorithm, size, rank, count, element_bytes, root);
  request.nodes = std::move(nodes);
  return request;
}

// For tests and the simulator: schedules and costs of groups spread over nodes (one node a rank).
void bindSpread(py::module_& module) {
  // Bytes that each rank sends to ranks of other nodes.
  module.def(
      "crossing_bytes",
      [](int op, int algorithm, size_t count, size_t element_bytes, int root,
         const std::vector<int>& nodes) {
        std::vector<size_t> crossing(nodes.size());
        for (size_t rank = 0; rank < nodes.size(); ++rank) {
          const Schedule schedule = makeSchedule(spreadRequest(
              op, algorithm, static_cast<int>(rank), count, element_bytes, root, nodes));
          for (const Step& step : schedule.steps) {
            for (const Send& send : step.sends) {
              if (nodes[rank] != nodes[static_cast<size_t>(send.peer)])
                crossing[rank] += send.from.bytes;
            }
          }
        }
        return crossing;
      },
      py::arg("op"), py::arg("algorithm"), py::arg("count"), py::arg("element_bytes"),
      py::arg("root"), py::arg("nodes"));
  module.def(
      "choose",
      [](int op, size_t count, size_t element_bytes, const std::vector<int>& nodes,
         const LinkCosts& local, const LinkCosts& remote) {
        const auto request = spreadRequest(op, 0, 0, count, element_bytes, 0, nodes);
        return algorithmName(chooseAlgorithm(request, costsOf(local), costsOf(remote)));
      },
      py::arg("op"), py::arg("count"), py::arg("element_bytes"), py::arg("nodes"), py::arg("local"),
      py::arg("remote"));
  module.def(
      "estimate_s",
      [](int op, int algorithm, size_t count, size_t element_bytes, const std::vector<int>& nodes,
         const LinkCosts& local, const LinkCosts& remote) {
        const auto request = spreadRequest(op, 0, 0, count, element_bytes, 0, nodes);
        return estimateSeconds(request, static_cast<Algorithm>(algorithm), costsOf(local),
                               costsOf(remote));
      },
      py::arg("op"), py::arg("algorithm"), py::arg("count"), py::arg("element_bytes"),
      py::arg("nodes"), py::arg("local"), py::arg("remote"));
  using Operation =
      std::tuple<int, int, size_t, int, bool, bool, std::vector<int>, std::vector<int>>;
  module.def(
      "check",
      [](int num_ranks, const std::vector<Operation>& operations, uint64_t seed, int fault) {
        std::vector<CheckedOperation> checked;
        for (const auto& [op, algorithm, count, root, average, in_place, ranks, nodes] :
             operations) {
          ScheduleRequest request = spreadRequest(op, algorithm, 0, count, 1, root, nodes);
          request.average = average;
          checked.push_back({std::move(request), ranks, in_place});
        }
        const py::gil_scoped_release release;
        return checkOperations(num_ranks, checked, seed, static_cast<Fault>(fault));
      },
      py::arg("num_ranks"), py::arg("operations"), py::arg("seed") = 0, py::arg("fault") = 0);
}

}  // namespace

void bindNccl(py::module_& module);  // nccl_py.cpp

void bindScale(py::module_& module) {
  module.attr("FRAME_HEAD_BYTES") = kFrameHeadBytes;
  // The views do not keep the frame alive: whoever uses them holds it.
  py::class_<Frame, FramePtr>(module, "Frame")
      .def(py::init<>())
      .def_property_readonly("head", [](Frame& f) { return viewOf(f.head(), kFrameHeadBytes); })
      .def_property_readonly("bulk", [](Frame& f) { return viewOf(f.bulk(), f.bulkBytes()); })
      .def_property_readonly("bulk_bytes", &Frame::bulkBytes)
      .def("expect_bulk", &Frame::expectBulk);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<FrameLink, std::shared_ptr<FrameLink>>(module, "FrameLink")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def_property_readonly("rank", &FrameLink::rank)
      .def_property_readonly("size", &FrameLink::size)
      .def("next", &FrameLink::next, py::arg("peer"), Unlocked())
      .def("deliver", &FrameLink::deliver, py::arg("peer"), py::arg("frame"), Unlocked())
      .def("wait_closed", &FrameLink::waitClosed, Unlocked())
      .def("lost", &FrameLink::lost, py::arg("peer"), py::arg("why"), Unlocked());
  module.def(
      "join_framed_world",
      [](const std::shared_ptr<FrameLink>& link, const std::string& name, double timeout_s) {
        return std::make_shared<World>(makeFramedTransport(link, name), timeout_s);
      },
      py::arg("link"), py::arg("name"), py::arg("timeout"));
  module.def("join_hosts", &joinHosts, py::arg("segment"), py::arg("link"), py::arg("host_of_rank"),
             py::arg("name"), py::arg("timeout"), py::arg("joining"),
             py::arg("pids") = std::vector<int>());
  module.def(
      "set_nodes",
      [](World& world, std::vector<int> nodes, const LinkCosts& remote) {
        world.setNodes(std::move(nodes), costsOf(remote));
      },
      py::arg("world"), py::arg("node_of_rank"), py::arg("remote_costs"));
  module.def(
      "nodes_of",
      [](const World& world) {
        std::vector<int> ranks(static_cast<size_t>(world.size()));
        std::iota(ranks.begin(), ranks.end(), 0);
        const std::vector<int> nodes = world.nodesOf(ranks);
        return nodes.empty() ? std::vector<int>(ranks.size()) : nodes;
      },
      py::arg("world"));
  bindSpread(module);
  bindNccl(module);
}

}  // namespace hdpcomm
