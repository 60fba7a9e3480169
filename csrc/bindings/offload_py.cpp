// The pinned pool and the copy engine. Addresses and streams cross as integers; compute=None: the
// calling thread computes.
#include <pybind11/stl.h>

#include "bindings/rooms.hpp"
#include "offload/copy_engine.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

using offload::Compute;
using offload::CopyEngine;
using offload::PinnedPool;
using Release = py::call_guard<py::gil_scoped_release>;

Compute computeOf(std::optional<uintptr_t> stream) {
  return stream ? Compute(Stream{*stream}) : Compute();
}

py::dict poolStats(const PinnedPool& pool) {
  const offload::PoolStats stats = pool.stats();
  py::dict found;
  found["capacity"] = stats.capacity;
  found["in_use"] = stats.in_use;
  found["retiring"] = stats.retiring;
  found["largest_free"] = stats.largest_free;
  found["peak_in_use"] = stats.peak_in_use;
  found["allocations"] = stats.allocations;
  found["stream_waits"] = stats.stream_waits;
  found["refusals"] = stats.refusals;
  found["chunks"] = stats.chunks;
  found["on_node"] = stats.on_node;
  return found;
}

py::dict copyStats(const CopyEngine& engine) {
  const offload::CopyStats stats = engine.stats();
  py::dict found;
  found["stores"] = stats.stores;
  found["loads"] = stats.loads;
  found["bytes_stored"] = stats.bytes_stored;
  found["bytes_loaded"] = stats.bytes_loaded;
  found["tickets"] = stats.tickets;
  found["host_wait_s"] = stats.host_wait_s;
  return found;
}

}  // namespace

void bindOffload(py::module_& module) {
  // Their destructors wait for copies and unpin memory: without the GIL.
  const py::release_gil_before_calling_cpp_dtor end_unlocked;
  py::class_<PinnedPool, std::shared_ptr<PinnedPool>>(module, "PinnedPool", end_unlocked)
      .def(py::init([](DevicePtr device, size_t bytes, int numa_node, size_t chunk_bytes,
                       int threads) {
             // Not Release(): pybind11 enters what a factory returned into its map of instances
             // under the guards of the call, and other threads would change that map meanwhile.
             const py::gil_scoped_release release;
             return std::make_shared<PinnedPool>(
                 std::move(device), offload::PoolOptions{bytes, numa_node, chunk_bytes, threads});
           }),
           py::arg("device"), py::arg("bytes"), py::kw_only(), py::arg("numa_node") = -1,
           py::arg("chunk_bytes") = offload::PoolOptions{}.chunk_bytes, py::arg("threads") = 0)
      .def("stats", &poolStats)
      .def("reset_peak", &PinnedPool::resetPeak);
  py::class_<CopyEngine>(module, "CopyEngine", end_unlocked)
      .def(py::init<std::shared_ptr<PinnedPool>, double>(), py::arg("pool"), py::kw_only(),
           py::arg("timeout"), Release())
      .def(
          "store",
          [](CopyEngine& engine, uintptr_t source, size_t bytes, std::optional<uintptr_t> compute) {
            return engine.store(reinterpret_cast<void*>(source), bytes, computeOf(compute));
          },
          py::arg("source"), py::arg("bytes"), py::kw_only(), py::arg("compute"), Release())
      .def(
          "finish_store",
          [](CopyEngine& engine, uint64_t ticket, std::optional<uintptr_t> compute) {
            engine.finishStore(ticket, computeOf(compute));
          },
          py::arg("ticket"), py::kw_only(), py::arg("compute"), Release())
      .def(
          "load",
          [](CopyEngine& engine, uint64_t ticket, uintptr_t target,
             std::optional<uintptr_t> compute) {
            engine.load(ticket, reinterpret_cast<void*>(target), computeOf(compute));
          },
          py::arg("ticket"), py::arg("target"), py::kw_only(), py::arg("compute"), Release())
      .def(
          "finish_load",
          [](CopyEngine& engine, uint64_t ticket, std::optional<uintptr_t> compute) {
            engine.finishLoad(ticket, computeOf(compute));
          },
          py::arg("ticket"), py::kw_only(), py::arg("compute"), Release())
      .def("drop", &CopyEngine::drop, py::arg("ticket"), Release())
      .def("drain", &CopyEngine::drain, py::arg("timeout") = 60.0, Release())
      .def("stats", &copyStats);
}

}  // namespace hdpcomm
