// The check mode of simulated devices (docs/device.md).
#include <pybind11/stl.h>

#include "bindings/rooms.hpp"
#include "device/simulated/fast_device.hpp"
#include "testing/check/checked_device.hpp"
#include "testing/check/device_check.hpp"
#include "testing/module.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {

using Release = py::call_guard<GilRelease>;

void bindDeviceCheck(py::module_& module) {
  simulated::open_checked = check::CheckedDevice::open;
  py::class_<CheckedOp>(module, "CheckedOp")
      .def_readonly("what", &CheckedOp::what)
      .def_readonly("who", &CheckedOp::who)
      .def_property_readonly("file", [](const CheckedOp& op) { return op.site.file; })
      .def_property_readonly("line", [](const CheckedOp& op) { return op.site.line; });
  py::class_<CheckReport>(module, "CheckReport")
      .def_readonly("kind", &CheckReport::kind)
      .def_readonly("first", &CheckReport::first)
      .def_readonly("second", &CheckReport::second)
      .def_readonly("text", &CheckReport::text);
  py::class_<OrderingSite>(module, "OrderingSite")
      .def_readonly("call", &OrderingSite::call)
      .def_readonly("uses", &OrderingSite::uses)
      .def_property_readonly("file", [](const OrderingSite& site) { return site.site.file; })
      .def_property_readonly("line", [](const OrderingSite& site) { return site.site.line; });
  py::class_<DeviceCheck>(module, "DeviceCheck")
      .def(py::init<uint64_t>(), py::arg("seed"))
      .def("enter_rank", &DeviceCheck::enterRank, py::arg("rank"), Release())
      .def("leave_rank", &DeviceCheck::leaveRank, Release())
      .def("finish", &DeviceCheck::finish, Release())
      .def("reports", &DeviceCheck::reports, py::arg("ignore") = py::none(), Release())
      .def("num_operations", &DeviceCheck::numOperations, Release())
      .def("ordering_sites", &DeviceCheck::orderingSites, Release());
}

}  // namespace hdpcomm::testing
