// Schedules as data, for tests, the simulator and whoever wants to look at one.
#include "bindings/collective_py.hpp"

#include <pybind11/stl.h>

#include "bindings/rooms.hpp"
#include "collective/cost.hpp"
#include "collective/peer_reads.hpp"
#include "testing/schedule_checker.hpp"

namespace py = pybind11;

namespace hdpcomm {
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

void bindSchedules(py::module_& module) {
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

  using Operation = std::tuple<int, int, size_t, int, bool, bool, std::vector<int>>;
  module.def(
      "check",
      [](int num_ranks, const std::vector<Operation>& operations, uint64_t seed, int fault) {
        std::vector<CheckedOperation> checked;
        for (const auto& [op, algorithm, count, root, average, in_place, ranks] : operations) {
          const auto size = static_cast<int>(ranks.size());
          checked.push_back(
              {requestOf(op, algorithm, size, 0, count, 1, root, average), ranks, in_place});
        }
        const py::gil_scoped_release release;
        return checkOperations(num_ranks, checked, seed, static_cast<Fault>(fault));
      },
      py::arg("num_ranks"), py::arg("operations"), py::arg("seed") = 0, py::arg("fault") = 0);
}

void bindCosts(py::module_& module) {
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
  const auto named = [](const TransportCosts& each) {
    py::dict costs;
    costs["alpha_s"] = each.alpha_s;
    costs["message_s"] = each.message_s;
    costs["beta_s_per_byte"] = each.beta_s_per_byte;
    costs["gamma_s_per_byte"] = each.gamma_s_per_byte;
    return costs;
  };
  module.attr("DEFAULT_COSTS") = named({});
  const DeviceTransportCosts device;
  py::dict device_costs = named(device.messages);
  device_costs["round_s"] = device.reads.round_s;
  device_costs["signal_s"] = device.reads.signal_s;
  device_costs["read_s_per_byte"] = device.reads.read_s_per_byte;
  module.attr("DEVICE_COSTS") = device_costs;
}

void bindDeviceCosts(py::module_& module) {
  py::class_<DeviceTransportCosts>(module, "DeviceTransportCosts")
      .def(py::init([](double alpha_s, double message_s, double beta, double gamma, double round_s,
                       double signal_s, double read, double window_bytes) {
             return DeviceTransportCosts{.messages = {alpha_s, message_s, beta, gamma},
                                         .reads = {round_s, signal_s, read},
                                         .window_bytes = window_bytes};
           }),
           py::kw_only(), py::arg("alpha_s"), py::arg("message_s"), py::arg("beta_s_per_byte"),
           py::arg("gamma_s_per_byte"), py::arg("round_s"), py::arg("signal_s"),
           py::arg("read_s_per_byte"),
           py::arg("window_bytes") = DeviceTransportCosts{}.window_bytes)
      .def(
          "choose",
          [](const DeviceTransportCosts& costs, int op, int group_size, size_t count,
             size_t element_bytes) {
            const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
            return algorithmName(chooseAlgorithm(request, costs));
          },
          py::arg("op"), py::arg("group_size"), py::arg("count"), py::arg("element_bytes"))
      .def(
          "estimate_s",
          [](const DeviceTransportCosts& costs, int op, int algorithm, int group_size, size_t count,
             size_t element_bytes) {
            const auto request = requestOf(op, 0, group_size, 0, count, element_bytes, 0);
            return estimateSeconds(request, static_cast<Algorithm>(algorithm), costs);
          },
          py::arg("op"), py::arg("algorithm"), py::arg("group_size"), py::arg("count"),
          py::arg("element_bytes"));
}

}  // namespace

void bindCollective(py::module_& module) {
  bindSchedules(module);
  bindCosts(module);
  bindDeviceCosts(module);
}

}  // namespace hdpcomm
