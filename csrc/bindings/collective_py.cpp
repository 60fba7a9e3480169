// The costs by which algorithms are chosen.
#include "bindings/rooms.hpp"
#include "collective/cost.hpp"
#include "collective/peer_reads.hpp"

namespace py = pybind11;

namespace hdpcomm {

void bindCollective(py::module_& module) {
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
           py::arg("window_bytes") = DeviceTransportCosts{}.window_bytes);
}

}  // namespace hdpcomm
