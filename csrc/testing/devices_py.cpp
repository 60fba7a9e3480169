// Devices of tests, and kernels whose place in the order of streams shows in their results.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "base/error.hpp"
#include "bindings/device_py.hpp"
#include "bindings/rooms.hpp"
#include "device/cuda/driver.hpp"
#include "device/devices.hpp"
#include "device/simulated/memory_device.hpp"
#include "device/simulated/wait.hpp"
#include "kernels/reduce.hpp"
#include "testing/module.hpp"
#include "testing/test_device.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

using Address = uintptr_t;
using Flags = std::vector<std::pair<Address, uint32_t>>;
using Unlocked = py::call_guard<GilRelease>;

// dst[i] += src[i], uint32_t modulo 2^32: its sums show whether it ran before or after something.
KernelLaunch accumulateKernel(Address dst, Address src, size_t count) {
  const kernels::ReduceArgs args{
      .out = reinterpret_cast<void*>(dst),
      .a = reinterpret_cast<const void*>(dst),
      .b = reinterpret_cast<const void*>(src),
      .count = static_cast<int64_t>(count),
      .dtype = DType::kUint32,
      .op = RedOp::kSum,
  };
  const size_t bytes = count * sizeof(uint32_t);
  KernelLaunch kernel;
  kernel.name = "accumulate";
  kernel.reads = {{args.b, bytes}, {args.a, bytes}};
  kernel.writes = {{args.out, bytes}};
  kernel.cpu = [args] { kernels::reduceCpu(args); };
#ifdef HDPCOMM_WITH_CUDA
  kernel.cuda = [args](void* stream) { kernels::reduceCuda(args, stream); };
#endif
  return kernel;
}

std::vector<FlagValue> flagsOf(const Flags& flags) {
  std::vector<FlagValue> values;
  for (const auto& [flag, value] : flags) {
    values.push_back({reinterpret_cast<uint32_t*>(flag), value});
  }
  return values;
}

void bindKernels(py::module_& module) {
  module.def(
      "accumulate",
      [](DeviceApi& device, Address dst, Address src, size_t count, uintptr_t stream) {
        atSite(
            [&](Site site) { device.launch(accumulateKernel(dst, src, count), {stream}, site); });
      },
      py::arg("device"), py::arg("dst"), py::arg("src"), py::kw_only(), py::arg("count"),
      py::arg("stream"));
  // DeviceApi::flagOps: waits, then writes.
  module.def(
      "flag_ops",
      [](DeviceApi& device, uintptr_t stream, const Flags& waits, const Flags& writes) {
        std::vector<FlagOp> ops;
        for (const FlagValue& each : flagsOf(waits)) {
          ops.push_back(FlagOp::wait(each.flag, each.value));
        }
        for (const FlagValue& each : flagsOf(writes)) {
          ops.push_back(FlagOp::write(each.flag, each.value));
        }
        device.flagOps({stream}, ops);
      },
      py::arg("device"), py::arg("stream"), py::kw_only(), py::arg("waits") = Flags{},
      py::arg("writes") = Flags{});
  // accumulate() with flags that the kernel itself waits for and sets; on simulated devices only.
  module.def(
      "accumulate_with_flags",
      [](DeviceApi& device, Address dst, Address src, size_t count, uintptr_t stream,
         const Flags& waits, const Flags& signals) {
        KernelLaunch kernel = accumulateKernel(dst, src, count);
        kernel.cuda = nullptr;
        kernel.waits = flagsOf(waits);
        kernel.signals = flagsOf(signals);
        atSite([&](Site site) { device.launch(std::move(kernel), {stream}, site); });
      },
      py::arg("device"), py::arg("dst"), py::arg("src"), py::kw_only(), py::arg("count"),
      py::arg("stream"), py::arg("waits"), py::arg("signals"));
  module.def(
      "launch_failing",
      [](DeviceApi& device, uintptr_t stream) {
        KernelLaunch kernel;
        kernel.name = "failing";
        kernel.cpu = [] { throw std::runtime_error("as the test wants"); };
        atSite([&](Site site) { device.launch(std::move(kernel), {stream}, site); });
      },
      py::arg("device"), py::arg("stream"));
  // A kernel that sets the word after the flag when it begins and runs until the flag is 1,
  // whatever happens to its device meanwhile.
  module.def(
      "launch_lasting",
      [](DeviceApi& device, uintptr_t stream, Address flag) {
        KernelLaunch kernel;
        kernel.name = "lasting";
        kernel.waits = {};
        kernel.reads = {{nullptr, size_t{1} << 20}};  // long enough for a thread of the stream
        kernel.cpu = [word = reinterpret_cast<uint32_t*>(flag)] {
          simulated::storeWord(word + 1, 1);
          while (simulated::loadWord(word) != 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        };
        atSite([&](Site site) { device.launch(std::move(kernel), {stream}, site); });
      },
      py::arg("device"), py::arg("stream"), py::arg("flag"));
}

// Gives the core's Device a method more.
template <typename Function, typename... Extra>
void addMethod(const char* name, Function function, const Extra&... extra) {
  const py::object device = py::type::of<DeviceApi>();
  device.attr(name) = py::cpp_function(function, py::name(name), py::is_method(device), extra...);
}

// The calls of a device that the product makes in C++ only.
void addDeviceMethods() {
  addMethod("can_access_peer", &DeviceApi::canAccessPeer, py::arg("ordinal"), Unlocked());
  addMethod("allocate", deviceCallAt<size_t>(&DeviceApi::allocate), py::arg("bytes"));
  addMethod("free", deviceCallAt<void*>(&DeviceApi::free), py::arg("memory"));
  addMethod("allocate_pinned", deviceCallAt<size_t>(&DeviceApi::allocatePinned), py::arg("bytes"));
  addMethod("free_pinned", deviceCallAt<void*>(&DeviceApi::freePinned), py::arg("memory"));
  addMethod("create_stream", deviceCall(&DeviceApi::createStream), py::arg("priority") = 0);
  addMethod("destroy_stream", deviceCall(&DeviceApi::destroyStream), py::arg("stream"));
  addMethod(
      "synchronize_stream",
      [](DeviceApi& device, uintptr_t stream, double timeout_s) {
        atSite([&](Site site) { device.synchronize(Stream{stream}, timeout_s, {}, site); });
      },
      py::arg("stream"), py::arg("timeout") = 60.0);
  addMethod("copy", deviceCallAt<void*, const void*, size_t, Stream>(&DeviceApi::copy),
            py::arg("dst"), py::arg("src"), py::kw_only(), py::arg("bytes"), py::arg("stream"));
  addMethod("register_pinned", deviceCall(&DeviceApi::registerPinned), py::arg("memory"),
            py::arg("bytes"));
  addMethod("unregister_pinned", deviceCall(&DeviceApi::unregisterPinned), py::arg("memory"));
  addMethod(
      "export_memory",
      [](DeviceApi& device, Address memory) {
        MemoryHandle handle;
        {
          const GilRelease release;
          handle = device.exportMemory(reinterpret_cast<void*>(memory));
        }
        return py::bytes(reinterpret_cast<const char*>(handle.bytes), MemoryHandle::kBytes);
      },
      py::arg("memory"));
  addMethod(
      "import_memory",
      [](DeviceApi& device, const py::bytes& bytes) {
        const MemoryHandle handle = handleOf(bytes);
        const GilRelease release;
        return plainOf(device.importMemory(handle));
      },
      py::arg("handle"));
  addMethod("close_memory", deviceCall(&DeviceApi::closeMemory), py::arg("memory"));
  addMethod("annotate_release", deviceCall(&DeviceApi::annotateRelease), py::arg("key"));
  addMethod("annotate_acquire", deviceCall(&DeviceApi::annotateAcquire), py::arg("key"));
  addMethod("is_capturing", deviceCall(&DeviceApi::isCapturing), py::arg("stream"));
  addMethod("fill", deviceCallAt<void*, unsigned char, size_t, Stream>(&DeviceApi::fill),
            py::arg("dst"), py::arg("value"), py::kw_only(), py::arg("bytes"), py::arg("stream"));
  addMethod("write_value", deviceCallAt<Stream, uint32_t*, uint32_t>(&DeviceApi::writeValue),
            py::arg("stream"), py::arg("flag"), py::arg("value"));
  addMethod("wait_value", deviceCallAt<Stream, uint32_t*, uint32_t>(&DeviceApi::waitValue),
            py::arg("stream"), py::arg("flag"), py::arg("value"));
  addMethod("store_flag", deviceCallAt<uint32_t*, uint32_t>(&DeviceApi::storeFlag), py::arg("flag"),
            py::arg("value"));
}

void bindTestDevice(py::module_& module) {
  py::class_<Capture, std::shared_ptr<Capture>>(module, "Graph")
      .def(
          "launch", [](Capture& graph, uintptr_t stream) { graph.launch({stream}); },
          py::arg("stream"), Unlocked());
  py::class_<TestDevice, DeviceApi, std::shared_ptr<TestDevice>>(module, "TestDevice")
      .def(py::init([](int ordinal, std::vector<int> out_of_reach) {
             auto device = std::make_shared<TestDevice>(ordinal);
             device->setUnreachable(std::move(out_of_reach));
             return device;
           }),
           py::arg("ordinal"), py::arg("out_of_reach") = std::vector<int>{})
      .def(
          "begin_capture",
          [](TestDevice& device, uintptr_t stream) { device.beginCapture({stream}); },
          py::arg("stream"), Unlocked())
      .def(
          "end_capture",
          [](TestDevice& device, uintptr_t stream) { return device.endCapture({stream}); },
          py::arg("stream"), Unlocked())
      .def("limit_threads", &TestDevice::limitThreads, py::arg("count"), Unlocked())
      .def("limit_queues", &TestDevice::limitQueues, py::arg("operations"),
           py::arg("blocks") = false, Unlocked())
      .def("take_turns_as", &TestDevice::takeTurnsAs, py::arg("identity"))
      .def("count_calls", &TestDevice::countCalls)
      .def("counted_calls", &TestDevice::countedCalls)
      .def_static("pause_at_random", &TestDevice::pauseAtRandom, py::arg("seed"),
                  py::arg("most_us"))
      .def("share_queues", &TestDevice::shareQueues, py::arg("count"))
      .def("before_import", &TestDevice::beforeImport, py::arg("call"))
      .def(
          "hold_copies",
          [](TestDevice& device, Address flag) {
            device.holdCopies(reinterpret_cast<uint32_t*>(flag));
          },
          py::arg("flag"), Unlocked());
}

}  // namespace

void bindDevices(py::module_& module) {
  addDeviceMethods();
  bindKernels(module);
  bindTestDevice(module);
  // A simulated device for which can_access_peer() is false for some others.
  module.def(
      "open_sim",
      [](int ordinal, std::vector<int> out_of_reach) {
        auto device = openSimDevice(ordinal);
        dynamic_cast<simulated::MemoryDevice&>(*device).setUnreachable(std::move(out_of_reach));
        return device;
      },
      py::arg("ordinal"), py::arg("out_of_reach"), Unlocked());
  // A CUDA device whose driver is another library.
  module.def(
      "open_cuda_from",
      [](const std::string& library, int ordinal) {
        return cuda::openDevice(library.c_str(), ordinal);
      },
      py::arg("library"), py::arg("ordinal"), Unlocked());
}

}  // namespace hdpcomm::testing
