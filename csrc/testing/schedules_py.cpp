// Schedules as data, their checker, and which algorithm the cost model chooses.
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/rooms.hpp"
#include "collective/cost.hpp"
#include "collective/peer_reads.hpp"
#include "testing/module.hpp"
#include "testing/requests.hpp"
#include "testing/schedule_checker.hpp"
#include "transport/stream/nccl/groups.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

py::tuple toPython(const Span& span) {
  static constexpr const char* kNames[] = {"in", "out", "temp"};
  return py::make_tuple(kNames[static_cast<size_t>(span.buffer)], span.offset, span.bytes);
}

py::dict toPython(const Step& step) {
  static constexpr const char* kMoves[] = {"copy", "reduce", "divide"};
  py::list moves;
  for (const Move& move : step.moves) {
    moves.append(py::make_tuple(kMoves[static_cast<size_t>(move.kind)], toPython(move.from),
                                toPython(move.to)));
  }
  py::list sends;
  for (const Send& send : step.sends) sends.append(py::make_tuple(send.peer, toPython(send.from)));
  py::list recvs;
  for (const Recv& recv : step.recvs) {
    recvs.append(py::make_tuple(recv.peer, toPython(recv.to),
                                recv.reduce ? py::object(toPython(recv.operand)) : py::none()));
  }
  py::dict result;
  result["moves"] = moves;
  result["sends"] = sends;
  result["recvs"] = recvs;
  return result;
}

void bindMaking(py::module_& module) {
  module.def(
      "schedule",
      [](int op, int algorithm, int group_size, int rank, size_t count, size_t element_bytes,
         int root, bool average) {
        const Schedule schedule = makeSchedule(
            requestOf(op, algorithm, group_size, rank, count, element_bytes, root, average));
        py::list steps;
        for (const Step& step : schedule.steps) steps.append(toPython(step));
        py::dict result;
        result["algorithm"] = algorithmName(schedule.algorithm);
        result["temp_bytes"] = schedule.temp_bytes;
        result["steps"] = steps;
        return result;
      },
      py::arg("op"), py::arg("algorithm"), py::arg("group_size"), py::arg("rank"), py::arg("count"),
      py::arg("element_bytes") = 1, py::arg("root") = -1, py::arg("average") = false);

  // The size of the largest NCCL group of the schedules of the first, middle and last rank.
  module.def(
      "nccl_groups",
      [](int op, int algorithm, int group_size, size_t count) {
        size_t most = 0;
        for (const int rank : {0, group_size / 2, group_size - 1}) {
          const auto request = requestOf(op, algorithm, group_size, rank, count, 1, 0);
          for (const auto& group : nccl::groupsOf(request, makeSchedule(request))) {
            most = std::max(most, group.sends.size() + group.recvs.size());
          }
        }
        return most;
      },
      py::arg("op"), py::arg("algorithm"), py::arg("group_size"), py::arg("count"));
}

using LinkCosts = std::tuple<double, double, double, double>;

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

// `nodes`: the node of each position, numbered from 0; empty: one node.
void bindChecking(py::module_& module) {
  using Operation =
      std::tuple<int, int, size_t, int, bool, bool, std::vector<int>, std::vector<int>>;
  module.def(
      "check",
      [](int num_ranks, const std::vector<Operation>& operations, uint64_t seed, int fault) {
        std::vector<CheckedOperation> checked;
        for (const auto& [op, algorithm, count, root, average, in_place, ranks, nodes] :
             operations) {
          ScheduleRequest request =
              requestOf(op, algorithm, static_cast<int>(ranks.size()), 0, count, 1, root, average);
          request.nodes = nodes;
          checked.push_back({std::move(request), ranks, in_place});
        }
        const GilRelease release;
        return checkOperations(num_ranks, checked, seed, static_cast<Fault>(fault));
      },
      py::arg("num_ranks"), py::arg("operations"), py::arg("seed") = 0, py::arg("fault") = 0);
}

void bindChoosing(py::module_& module) {
  module.def(
      "choose",
      [](int op, int group_size, size_t count, size_t element_bytes, double alpha_s,
         double message_s, double beta, double gamma) {
        const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
        return algorithmName(
            chooseAlgorithm(request, TransportCosts{alpha_s, message_s, beta, gamma}));
      },
      py::arg("op"), py::arg("group_size"), py::arg("count"), py::arg("element_bytes"),
      py::arg("alpha_s"), py::arg("message_s"), py::arg("beta_s_per_byte"),
      py::arg("gamma_s_per_byte"));
  module.def(
      "estimate_s",
      [](int op, int algorithm, int group_size, size_t count, size_t element_bytes, double alpha_s,
         double message_s, double beta, double gamma) {
        const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
        return estimateSeconds(request, static_cast<Algorithm>(algorithm),
                               TransportCosts{alpha_s, message_s, beta, gamma});
      },
      py::arg("op"), py::arg("algorithm"), py::arg("group_size"), py::arg("count"),
      py::arg("element_bytes"), py::arg("alpha_s"), py::arg("message_s"),
      py::arg("beta_s_per_byte"), py::arg("gamma_s_per_byte"));
  module.def(
      "choose_across_nodes",
      [](int op, size_t count, size_t element_bytes, const std::vector<int>& nodes,
         const LinkCosts& local, const LinkCosts& remote) {
        const auto request = spreadRequest(op, 0, 0, count, element_bytes, 0, nodes);
        return algorithmName(chooseAlgorithm(request, costsOf(local), costsOf(remote)));
      },
      py::arg("op"), py::arg("count"), py::arg("element_bytes"), py::arg("nodes"), py::arg("local"),
      py::arg("remote"));
  module.def(
      "estimate_across_nodes_s",
      [](int op, int algorithm, size_t count, size_t element_bytes, const std::vector<int>& nodes,
         const LinkCosts& local, const LinkCosts& remote) {
        const auto request = spreadRequest(op, 0, 0, count, element_bytes, 0, nodes);
        return estimateSeconds(request, static_cast<Algorithm>(algorithm), costsOf(local),
                               costsOf(remote));
      },
      py::arg("op"), py::arg("algorithm"), py::arg("count"), py::arg("element_bytes"),
      py::arg("nodes"), py::arg("local"), py::arg("remote"));
  module.def(
      "choose_on_devices",
      [](const DeviceTransportCosts& costs, int op, int group_size, size_t count,
         size_t element_bytes) {
        const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
        return algorithmName(chooseAlgorithm(request, costs));
      },
      py::arg("costs"), py::arg("op"), py::arg("group_size"), py::arg("count"),
      py::arg("element_bytes"));
  module.def(
      "estimate_on_devices_s",
      [](const DeviceTransportCosts& costs, int op, int algorithm, int group_size, size_t count,
         size_t element_bytes) {
        const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
        return estimateSeconds(request, static_cast<Algorithm>(algorithm), costs);
      },
      py::arg("costs"), py::arg("op"), py::arg("algorithm"), py::arg("group_size"),
      py::arg("count"), py::arg("element_bytes"));
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
}

}  // namespace

void bindSchedules(py::module_& module) {
  bindMaking(module);
  bindChecking(module);
  bindChoosing(module);
}

}  // namespace hdpcomm::testing
