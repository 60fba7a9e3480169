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
using Release = py::call_guard<GilRelease>;

Compute computeOf(std::optional<uintptr_t> stream) {
  return stream ? Compute(Stream{*stream}) : Compute();
}

// Bytes in the pool, or on their way there, with the objects whose memory the copies use: owned
// from before Python sees the copy until it was finished, so an exception in between (Python runs
// signal handlers after any call) frees nothing that is in flight.
class PooledCopy {
 public:
  PooledCopy(std::shared_ptr<CopyEngine> engine, CopyEngine::Ticket ticket, py::object source)
      : engine_(std::move(engine)), ticket_(ticket) {
    own(std::move(source));
  }
  ~PooledCopy() {
    const py::error_scope raised;  // it may go while an exception unwinds
    try {
      if (!dropped_) drop();
    } catch (const std::exception&) {
      // A copy that does not end keeps its memory.
      static_cast<void>(new std::vector<py::object>(std::move(owners_)));
    }
    const GilRelease release;
    engine_.reset();
  }
  PooledCopy(const PooledCopy&) = delete;
  PooledCopy& operator=(const PooledCopy&) = delete;

  void finishStore(std::optional<uintptr_t> compute) {
    {
      const GilRelease release;
      engine_->finishStore(ticket_, computeOf(compute));
    }
    owners_.clear();
  }
  void load(uintptr_t target, std::optional<uintptr_t> compute, py::object owner) {
    own(std::move(owner));
    const GilRelease release;
    engine_->load(ticket_, reinterpret_cast<void*>(target), computeOf(compute));
  }
  void finishLoad(std::optional<uintptr_t> compute) {
    {
      const GilRelease release;
      engine_->finishLoad(ticket_, computeOf(compute));
    }
    owners_.clear();
  }
  void drop() {
    {
      const bool in_flight = !owners_.empty();
      const GilRelease release;
      if (in_flight) engine_->finishLoad(ticket_, Compute());  // the host waits
      engine_->drop(ticket_);
    }
    dropped_ = true;
    owners_.clear();
  }

 private:
  void own(py::object owner) {
    if (!owner.is_none()) owners_.push_back(std::move(owner));
  }

  std::shared_ptr<CopyEngine> engine_;
  CopyEngine::Ticket ticket_;
  std::vector<py::object> owners_;
  bool dropped_ = false;
};

py::object store(const std::shared_ptr<CopyEngine>& engine, uintptr_t source, size_t bytes,
                 std::optional<uintptr_t> compute, py::object owner) {
  CopyEngine::Ticket ticket = 0;
  {
    const GilRelease release;
    ticket = engine->store(reinterpret_cast<void*>(source), bytes, computeOf(compute));
  }
  if (ticket == 0) return py::none();
  return py::cast(std::make_unique<PooledCopy>(engine, ticket, std::move(owner)));
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
             const GilRelease release;
             return std::make_shared<PinnedPool>(
                 std::move(device), offload::PoolOptions{bytes, numa_node, chunk_bytes, threads});
           }),
           py::arg("device"), py::arg("bytes"), py::kw_only(), py::arg("numa_node") = -1,
           py::arg("chunk_bytes") = offload::PoolOptions{}.chunk_bytes, py::arg("threads") = 0)
      .def("stats", &poolStats);
  py::class_<PooledCopy>(module, "PooledCopy")
      .def("finish_store", &PooledCopy::finishStore, py::kw_only(), py::arg("compute"))
      .def("load", &PooledCopy::load, py::arg("target"), py::kw_only(), py::arg("compute"),
           py::arg("owner"))
      .def("finish_load", &PooledCopy::finishLoad, py::kw_only(), py::arg("compute"))
      .def("drop", &PooledCopy::drop);
  py::class_<CopyEngine, std::shared_ptr<CopyEngine>>(module, "CopyEngine", end_unlocked)
      .def(py::init<std::shared_ptr<PinnedPool>, double>(), py::arg("pool"), py::kw_only(),
           py::arg("timeout"), Release())
      .def("store", &store, py::arg("source"), py::arg("bytes"), py::kw_only(), py::arg("compute"),
           py::arg("owner"))
      .def("drain", &CopyEngine::drain, py::arg("timeout") = 60.0, Release())
      .def("stats", &copyStats);
}

}  // namespace hdpcomm
