// Memory of a device that tensors of any library view by DLPack, and that lives as long as they.
#include <cstring>
#include <memory>

#include "bindings/device_py.hpp"
#include "bindings/dlpack.hpp"
#include "device/handles.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

constexpr const char* kCapsule = "dltensor";

class Memory {
 public:
  Memory(const DevicePtr& device, size_t bytes, Site site)
      : device_(device), address_(device->allocate(bytes, site)), bytes_(bytes) {
    owner_ = std::make_shared<DeviceMemory>(device, address_);
    handle_ = device->exportMemory(address_);
  }
  Memory(const DevicePtr& device, const MemoryHandle& handle, size_t bytes)
      : device_(device), address_(device->importMemory(handle)), bytes_(bytes), handle_(handle) {
    owner_ = std::make_shared<ImportedMemory>(device, address_);
  }

  const MemoryHandle& handle() const noexcept { return handle_; }

  py::capsule dlpack() const {
    struct View {
      DLManagedTensorAbi managed{};
      std::shared_ptr<void> owner;
      int64_t shape = 0;
    };
    auto view = std::make_unique<View>();
    view->owner = owner_;
    view->shape = static_cast<int64_t>(bytes_);
    view->managed.tensor = {.data = address_,
                            .device_type = device_->isSim() ? dlpack::kCpu : dlpack::kCuda,
                            .device_id = device_->isSim() ? 0 : device_->ordinal(),
                            .ndim = 1,
                            .type_code = dlpack::kUnsigned,
                            .type_bits = 8,
                            .type_lanes = 1,
                            .shape = &view->shape,
                            .strides = nullptr,
                            .byte_offset = 0};
    view->managed.context = view.get();
    view->managed.deleter = [](DLManagedTensorAbi* self) {
      delete static_cast<View*>(self->context);  // NOLINT: owned by who took the capsule
    };
    py::capsule capsule(&view->managed, kCapsule, [](PyObject* object) {
      if (PyCapsule_IsValid(object, kCapsule) == 0) return;  // taken, and renamed
      auto* managed = static_cast<DLManagedTensorAbi*>(PyCapsule_GetPointer(object, kCapsule));
      managed->deleter(managed);
    });
    view.release();  // NOLINT: the capsule's
    return capsule;
  }

 private:
  DevicePtr device_;
  void* address_;
  size_t bytes_;
  std::shared_ptr<void> owner_;
  MemoryHandle handle_;
};

}  // namespace

void bindDeviceMemory(py::module_& module) {
  py::class_<Memory>(module, "Memory")
      .def(
          py::init([](const DevicePtr& device, size_t bytes) {
            return atSite([&](Site site) { return std::make_unique<Memory>(device, bytes, site); });
          }),
          py::arg("device"), py::arg("bytes"))
      .def_static(
          "mapped",
          [](const DevicePtr& device, const py::bytes& handle, size_t bytes) {
            const MemoryHandle found = handleOf(handle);
            const GilRelease release;
            return std::make_unique<Memory>(device, found, bytes);
          },
          py::arg("device"), py::arg("handle"), py::arg("bytes"))
      .def_property_readonly("handle",
                             [](const Memory& memory) {
                               return py::bytes(
                                   reinterpret_cast<const char*>(memory.handle().bytes),
                                   MemoryHandle::kBytes);
                             })
      .def("dlpack", &Memory::dlpack);
}

}  // namespace hdpcomm
