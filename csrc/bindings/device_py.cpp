// Devices. Streams, events and memory cross as integers; the call site of an operation is the line
// of Python that called it.
#include "bindings/device_py.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <mutex>
#include <set>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "device/devices.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Address = uintptr_t;
using Release = py::call_guard<GilRelease>;

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}
Address address(const void* memory) { return reinterpret_cast<Address>(memory); }

template <typename Class>
void bindMemory(Class& device) {
  device
      .def(
          "allocate",
          [](DeviceApi& d, size_t bytes) {
            return atSite([&](Site site) { return address(d.allocate(bytes, site)); });
          },
          py::arg("bytes"))
      .def(
          "free",
          [](DeviceApi& d, Address memory) {
            atSite([&](Site site) { d.free(pointer(memory), site); });
          },
          py::arg("memory"))
      .def(
          "allocate_pinned",
          [](DeviceApi& d, size_t bytes) {
            return atSite([&](Site site) { return address(d.allocatePinned(bytes, site)); });
          },
          py::arg("bytes"))
      .def(
          "free_pinned",
          [](DeviceApi& d, Address memory) {
            atSite([&](Site site) { d.freePinned(pointer(memory), site); });
          },
          py::arg("memory"))
      .def(
          "register_pinned",
          [](DeviceApi& d, Address memory, size_t bytes) {
            d.registerPinned(pointer(memory), bytes);
          },
          py::arg("memory"), py::arg("bytes"), Release())
      .def(
          "unregister_pinned",
          [](DeviceApi& d, Address memory) { d.unregisterPinned(pointer(memory)); },
          py::arg("memory"), Release())
      .def(
          "export_memory",
          [](DeviceApi& d, Address memory) {
            MemoryHandle handle;
            {
              const GilRelease release;
              handle = d.exportMemory(pointer(memory));
            }
            return py::bytes(reinterpret_cast<const char*>(handle.bytes), MemoryHandle::kBytes);
          },
          py::arg("memory"))
      .def(
          "import_memory",
          [](DeviceApi& d, const py::bytes& bytes) {
            const MemoryHandle handle = handleOf(bytes);
            const GilRelease release;
            return address(d.importMemory(handle));
          },
          py::arg("handle"))
      .def(
          "close_memory", [](DeviceApi& d, Address memory) { d.closeMemory(pointer(memory)); },
          py::arg("memory"), Release());
}

template <typename Class>
void bindStreams(Class& device) {
  device
      .def(
          "create_stream",
          [](DeviceApi& d, int priority) { return d.createStream(priority).handle; },
          py::arg("priority") = 0, Release())
      .def(
          "destroy_stream", [](DeviceApi& d, uintptr_t stream) { d.destroyStream({stream}); },
          py::arg("stream"), Release())
      .def(
          "create_event", [](DeviceApi& d) { return d.createEvent().handle; }, Release())
      .def(
          "destroy_event", [](DeviceApi& d, uintptr_t event) { d.destroyEvent({event}); },
          py::arg("event"), Release())
      .def(
          "record",
          [](DeviceApi& d, uintptr_t event, uintptr_t stream) {
            atSite([&](Site site) { d.record({event}, {stream}, site); });
          },
          py::arg("event"), py::arg("stream"))
      .def(
          "wait",
          [](DeviceApi& d, uintptr_t stream, uintptr_t event) {
            atSite([&](Site site) { d.wait({stream}, {event}, site); });
          },
          py::arg("stream"), py::arg("event"))
      .def(
          "query", [](DeviceApi& d, uintptr_t event) { return d.query({event}); }, py::arg("event"),
          Release())
      .def(
          "synchronize_event",
          [](DeviceApi& d, uintptr_t event, double timeout_s) {
            atSite([&](Site site) { d.synchronize(Event{event}, timeout_s, checkSignals, site); });
          },
          py::arg("event"), py::arg("timeout") = 60.0)
      .def(
          "synchronize_stream",
          [](DeviceApi& d, uintptr_t stream, double timeout_s) {
            atSite(
                [&](Site site) { d.synchronize(Stream{stream}, timeout_s, checkSignals, site); });
          },
          py::arg("stream"), py::arg("timeout") = 60.0)
      .def(
          "is_capturing", [](DeviceApi& d, uintptr_t stream) { return d.isCapturing({stream}); },
          py::arg("stream"), Release());
}

template <typename Class>
void bindWork(Class& device) {
  device
      .def(
          "copy",
          [](DeviceApi& d, Address dst, Address src, size_t bytes, uintptr_t stream) {
            atSite([&](Site site) { d.copy(pointer(dst), pointer(src), bytes, {stream}, site); });
          },
          py::arg("dst"), py::arg("src"), py::kw_only(), py::arg("bytes"), py::arg("stream"))
      .def(
          "fill",
          [](DeviceApi& d, Address dst, unsigned char value, size_t bytes, uintptr_t stream) {
            atSite([&](Site site) { d.fill(pointer(dst), value, bytes, {stream}, site); });
          },
          py::arg("dst"), py::arg("value"), py::kw_only(), py::arg("bytes"), py::arg("stream"))
      .def(
          "write_value",
          [](DeviceApi& d, uintptr_t stream, Address flag, uint32_t value) {
            atSite(
                [&](Site site) { d.writeValue({stream}, pointer<uint32_t>(flag), value, site); });
          },
          py::arg("stream"), py::arg("flag"), py::arg("value"))
      .def(
          "wait_value",
          [](DeviceApi& d, uintptr_t stream, Address flag, uint32_t value) {
            atSite([&](Site site) { d.waitValue({stream}, pointer<uint32_t>(flag), value, site); });
          },
          py::arg("stream"), py::arg("flag"), py::arg("value"));
}

template <typename Class>
void bindHost(Class& device) {
  device
      .def(
          "store_flag",
          [](DeviceApi& d, Address flag, uint32_t value) {
            atSite([&](Site site) { d.storeFlag(pointer<uint32_t>(flag), value, site); });
          },
          py::arg("flag"), py::arg("value"))
      .def(
          "load_flag",
          [](DeviceApi& d, Address flag) {
            return atSite([&](Site site) { return d.loadFlag(pointer<uint32_t>(flag), site); });
          },
          py::arg("flag"))
      .def(
          "annotate_read",
          [](DeviceApi& d, Address data, size_t bytes) {
            atSite([&](Site site) { d.annotateRead(pointer(data), bytes, site); });
          },
          py::arg("data"), py::arg("bytes"))
      .def(
          "annotate_write",
          [](DeviceApi& d, Address data, size_t bytes) {
            atSite([&](Site site) { d.annotateWrite(pointer(data), bytes, site); });
          },
          py::arg("data"), py::arg("bytes"))
      .def(
          "annotate_free",
          [](DeviceApi& d, Address data, size_t bytes) {
            atSite([&](Site site) { d.annotateFree(pointer(data), bytes, site); });
          },
          py::arg("data"), py::arg("bytes"))
      .def("annotate_release", &DeviceApi::annotateRelease, py::arg("key"), Release())
      .def("annotate_acquire", &DeviceApi::annotateAcquire, py::arg("key"), Release());
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
      .def_property_readonly("ordinal", &DeviceApi::ordinal)
      .def("can_access_peer", &DeviceApi::canAccessPeer, py::arg("ordinal"), Release());
  bindMemory(device);
  bindStreams(device);
  bindWork(device);
  bindHost(device);
  bindDeviceMemory(module);
  module.def("open_sim", &openSimDevice, py::arg("ordinal"),
             py::arg("out_of_reach") = std::vector<int>{}, Release());
  module.def("open_cuda", &openCudaDevice, py::arg("ordinal"), Release());
  module.def("cuda_device_count", &cudaDeviceCount, Release());
  module.def("cuda_driver_version", &cudaDriverVersion, Release());
}

}  // namespace hdpcomm
