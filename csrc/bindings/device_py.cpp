// Devices. Streams, events and memory cross as integers; the call site of an operation is the line
// of Python that called it.
#include "bindings/device_py.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <mutex>
#include <set>
#include <type_traits>

#include "base/error.hpp"
#include "bindings/rooms.hpp"
#include "device/devices.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using Release = py::call_guard<GilRelease>;

// Addresses, streams and events cross as integers.
template <typename Value>
constexpr bool kHandle = std::is_same_v<Value, Stream> || std::is_same_v<Value, Event>;
template <typename Value>
using Plain = std::conditional_t<std::is_pointer_v<Value> || kHandle<Value>, uintptr_t, Value>;

template <typename Value>
Value taken(Plain<Value> plain) {
  if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<Value>(plain);
  } else {
    return Value{plain};
  }
}

template <typename Value>
Plain<Value> given(Value value) {
  if constexpr (std::is_pointer_v<Value>) {
    return reinterpret_cast<uintptr_t>(value);
  } else if constexpr (kHandle<Value>) {
    return value.handle;
  } else {
    return value;
  }
}

// A call of the device without the GIL.
template <typename Result, typename... Args>
auto call(Result (DeviceApi::*method)(Args...)) {
  return [method](DeviceApi& device, Plain<Args>... args) {
    const GilRelease release;
    if constexpr (std::is_void_v<Result>) {
      (device.*method)(taken<Args>(args)...);
    } else {
      return given((device.*method)(taken<Args>(args)...));
    }
  };
}

// The same of one that takes the line of its caller.
template <typename... Args, typename Method>
auto callAt(Method method) {
  using Result = std::invoke_result_t<Method, DeviceApi&, Args..., Site>;
  return [method](DeviceApi& device, Plain<Args>... args) {
    return atSite([&](Site site) {
      if constexpr (std::is_void_v<Result>) {
        (device.*method)(taken<Args>(args)..., site);
      } else {
        return given((device.*method)(taken<Args>(args)..., site));
      }
    });
  };
}

// Waits for an event or a stream.
template <typename Awaited>
void synchronize(DeviceApi& device, uintptr_t awaited, double timeout_s) {
  atSite([&](Site site) { device.synchronize(Awaited{awaited}, timeout_s, checkSignals, site); });
}

py::bytes exportMemory(DeviceApi& device, uintptr_t memory) {
  MemoryHandle handle;
  {
    const GilRelease release;
    handle = device.exportMemory(reinterpret_cast<void*>(memory));
  }
  return {reinterpret_cast<const char*>(handle.bytes), MemoryHandle::kBytes};
}

uintptr_t importMemory(DeviceApi& device, const py::bytes& bytes) {
  const MemoryHandle handle = handleOf(bytes);
  const GilRelease release;
  return given(device.importMemory(handle));
}

void bindMemory(py::class_<DeviceApi, std::shared_ptr<DeviceApi>>& device) {
  device.def("allocate", callAt<size_t>(&DeviceApi::allocate), py::arg("bytes"))
      .def("free", callAt<void*>(&DeviceApi::free), py::arg("memory"))
      .def("allocate_pinned", callAt<size_t>(&DeviceApi::allocatePinned), py::arg("bytes"))
      .def("free_pinned", callAt<void*>(&DeviceApi::freePinned), py::arg("memory"))
      .def("register_pinned", call(&DeviceApi::registerPinned), py::arg("memory"), py::arg("bytes"))
      .def("unregister_pinned", call(&DeviceApi::unregisterPinned), py::arg("memory"))
      .def("export_memory", &exportMemory, py::arg("memory"))
      .def("import_memory", &importMemory, py::arg("handle"))
      .def("close_memory", call(&DeviceApi::closeMemory), py::arg("memory"))
      .def("annotate_read", callAt<const void*, size_t>(&DeviceApi::annotateRead), py::arg("data"),
           py::arg("bytes"))
      .def("annotate_write", callAt<void*, size_t>(&DeviceApi::annotateWrite), py::arg("data"),
           py::arg("bytes"))
      .def("annotate_free", callAt<const void*, size_t>(&DeviceApi::annotateFree), py::arg("data"),
           py::arg("bytes"))
      .def("annotate_release", call(&DeviceApi::annotateRelease), py::arg("key"))
      .def("annotate_acquire", call(&DeviceApi::annotateAcquire), py::arg("key"));
}

void bindStreams(py::class_<DeviceApi, std::shared_ptr<DeviceApi>>& device) {
  device.def("create_stream", call(&DeviceApi::createStream), py::arg("priority") = 0)
      .def("destroy_stream", call(&DeviceApi::destroyStream), py::arg("stream"))
      .def("create_event", call(&DeviceApi::createEvent))
      .def("destroy_event", call(&DeviceApi::destroyEvent), py::arg("event"))
      .def("record", callAt<Event, Stream>(&DeviceApi::record), py::arg("event"), py::arg("stream"))
      .def("wait", callAt<Stream, Event>(&DeviceApi::wait), py::arg("stream"), py::arg("event"))
      .def("query", call(&DeviceApi::query), py::arg("event"))
      .def("synchronize_event", &synchronize<Event>, py::arg("event"), py::arg("timeout") = 60.0)
      .def("synchronize_stream", &synchronize<Stream>, py::arg("stream"), py::arg("timeout") = 60.0)
      .def("is_capturing", call(&DeviceApi::isCapturing), py::arg("stream"))
      .def("copy", callAt<void*, const void*, size_t, Stream>(&DeviceApi::copy), py::arg("dst"),
           py::arg("src"), py::kw_only(), py::arg("bytes"), py::arg("stream"))
      .def("fill", callAt<void*, unsigned char, size_t, Stream>(&DeviceApi::fill), py::arg("dst"),
           py::arg("value"), py::kw_only(), py::arg("bytes"), py::arg("stream"))
      .def("write_value", callAt<Stream, uint32_t*, uint32_t>(&DeviceApi::writeValue),
           py::arg("stream"), py::arg("flag"), py::arg("value"))
      .def("wait_value", callAt<Stream, uint32_t*, uint32_t>(&DeviceApi::waitValue),
           py::arg("stream"), py::arg("flag"), py::arg("value"))
      .def("store_flag", callAt<uint32_t*, uint32_t>(&DeviceApi::storeFlag), py::arg("flag"),
           py::arg("value"))
      .def("load_flag", callAt<const uint32_t*>(&DeviceApi::loadFlag), py::arg("flag"));
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
  bindDeviceMemory(module);
  module.def("open_sim", &openSimDevice, py::arg("ordinal"),
             py::arg("out_of_reach") = std::vector<int>{}, Release());
  module.def("open_cuda", &openCudaDevice, py::arg("ordinal"), Release());
  module.def("cuda_device_count", &cudaDeviceCount, Release());
}

}  // namespace hdpcomm
