// Devices. Streams, events and memory cross as integers; the call site of an operation is the line
// of Python that called it.
#include "bindings/device_py.hpp"

#include <cstring>
#include <mutex>
#include <set>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "device/devices.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Release = py::call_guard<GilRelease>;

void bindMemory(py::class_<DeviceApi, std::shared_ptr<DeviceApi>>& device) {
  device
      .def("annotate_read", deviceCallAt<const void*, size_t>(&DeviceApi::annotateRead),
           py::arg("data"), py::arg("bytes"))
      .def("annotate_write", deviceCallAt<void*, size_t>(&DeviceApi::annotateWrite),
           py::arg("data"), py::arg("bytes"))
      .def("annotate_free", deviceCallAt<const void*, size_t>(&DeviceApi::annotateFree),
           py::arg("data"), py::arg("bytes"));
}

void bindEvents(py::class_<DeviceApi, std::shared_ptr<DeviceApi>>& device) {
  device.def("create_event", deviceCall(&DeviceApi::createEvent))
      .def("destroy_event", deviceCall(&DeviceApi::destroyEvent), py::arg("event"))
      .def("record", deviceCallAt<Event, Stream>(&DeviceApi::record), py::arg("event"),
           py::arg("stream"))
      .def("wait", deviceCallAt<Stream, Event>(&DeviceApi::wait), py::arg("stream"),
           py::arg("event"))
      .def("query", deviceCall(&DeviceApi::query), py::arg("event"))
      .def(
          "synchronize_event",
          [](DeviceApi& own, uintptr_t event, double timeout_s) {
            atSite(
                [&](Site site) { own.synchronize(Event{event}, timeout_s, checkSignals, site); });
          },
          py::arg("event"), py::arg("timeout") = 60.0);
}

}  // namespace

Site callSite() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {"python", "", 0};
  const auto code =
      py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  static std::mutex mutex;
  static auto* names = new std::set<std::string>;  // Site holds their characters
  const std::lock_guard lock(mutex);
  return {names->insert(py::cast<std::string>(code.attr("co_filename"))).first->c_str(),
          names->insert(py::cast<std::string>(code.attr("co_name"))).first->c_str(),
          static_cast<unsigned>(PyFrame_GetLineNumber(frame))};
}

MemoryHandle handleOf(const py::bytes& bytes) {
  const std::string_view view = bytes;
  if (view.size() != MemoryHandle::kBytes) {
    throwInvalidUsage("a memory handle has " + std::to_string(MemoryHandle::kBytes) +
                      " bytes, this one " + std::to_string(view.size()) +
                      "; give what export_memory returned");
  }
  MemoryHandle handle;
  std::memcpy(handle.bytes, view.data(), MemoryHandle::kBytes);
  return handle;
}

void bindDevice(py::module_& module) {
  py::class_<DeviceApi, std::shared_ptr<DeviceApi>> device(module, "Device");
  device.def_property_readonly("name", &DeviceApi::name)
      .def_property_readonly("is_sim", &DeviceApi::isSim)
      .def_property_readonly("ordinal", &DeviceApi::ordinal);
  bindMemory(device);
  bindEvents(device);
  bindDeviceMemory(module);
  module.def("open_sim", &openSimDevice, py::arg("ordinal"), Release());
  module.def("open_cuda", &openCudaDevice, py::arg("ordinal"), Release());
}

}  // namespace hdpcomm
