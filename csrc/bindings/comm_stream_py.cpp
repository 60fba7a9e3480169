// StreamEngine and its works; what it runs is in comm_calls_py.cpp.
#include <pybind11/stl.h>

#include "bindings/comm_py.hpp"
#include "comm/stream/join_devices.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

void waitFor(const StreamHandle& handle, double timeout_s) {
  const GilRelease release;
  handle.engine->waitFor(handle.work, timeout_s, checkSignals);
}

void waitOn(const StreamHandle& handle, uintptr_t stream) {
  const GilRelease release;
  handle.engine->waitOn(*handle.work, Stream{stream});
}

bool ended(const StreamHandle& handle) {
  const GilRelease release;
  return handle.done();
}

bool failed(const StreamHandle& handle) {
  const GilRelease release;
  return handle.engine->failed(*handle.work);
}

LinkJoining linkJoining(size_t slot_bytes, int num_slots, int num_lanes, size_t landing_bytes,
                        size_t window_bytes, size_t small_bytes,
                        const DeviceTransportCosts& costs) {
  return {.arena = {.slot_bytes = slot_bytes,
                    .num_slots = num_slots,
                    .num_lanes = num_lanes,
                    .landing_bytes = landing_bytes,
                    .window_bytes = window_bytes,
                    .small_bytes = small_bytes},
          .costs = costs};
}

// The callable is run, and dropped, on threads that do not hold the GIL.
std::function<std::shared_ptr<const NcclApi>()> libraryFrom(py::function load) {
  const std::shared_ptr<py::function> held(new py::function(std::move(load)),
                                           [](py::function* function) {
                                             const py::gil_scoped_acquire acquire;
                                             delete function;
                                           });
  return [held]() -> std::shared_ptr<const NcclApi> {
    const py::gil_scoped_acquire acquire;
    return (*held)().cast<std::shared_ptr<NcclApi>>();
  };
}

NcclJoining ncclJoining(py::function library, int connect_distance, const LinkCosts& inside,
                        const LinkCosts& between) {
  return {.library = libraryFrom(std::move(library)),
          .connect_distance = connect_distance,
          .costs = {.inside = std::make_from_tuple<TransportCosts>(inside),
                    .between = std::make_from_tuple<TransportCosts>(between)}};
}

std::shared_ptr<StreamEngine> attached(const Communicator& comm,
                                       std::shared_ptr<StreamEngine> engine) {
  comm.world().attach(engine);
  return engine;
}

void bindEngineOptions(py::module_& module) {
  py::class_<LinkJoining>(module, "LinkJoining")
      .def(py::init(&linkJoining), py::kw_only(), py::arg("slot_bytes"), py::arg("num_slots"),
           py::arg("num_lanes"), py::arg("landing_bytes"), py::arg("window_bytes"),
           py::arg("small_bytes"), py::arg("costs"))
      .def(
          "arena_bytes",
          [](const LinkJoining& links, int num_ranks) {
            return device::arenaBytes(device::withSlotBytes(links.arena, num_ranks), num_ranks);
          },
          py::arg("num_ranks"));
  py::class_<NcclJoining>(module, "NcclJoining")
      .def(py::init(&ncclJoining), py::kw_only(), py::arg("library"), py::arg("connect_distance"),
           py::arg("inside"), py::arg("between"));
}

}  // namespace

void bindStream(py::module_& module) {
  bindEngineOptions(module);
  InFlightClass<StreamHandle>(module, "StreamWork")
      .def("wait", &waitFor, py::arg("timeout") = -1.0)
      .def("wait_on", &waitOn, py::arg("stream"))
      .def("release_buffers", &StreamHandle::releaseBuffers)
      .def("done", &ended)
      .def_property_readonly("failed", &failed)
      .def("__repr__", [](const StreamHandle& handle) {
        return "<Work " + describe(handle.work->call()) + ">";
      });
  using Unlocked = py::call_guard<GilRelease>;
  py::class_<StreamEngine, std::shared_ptr<StreamEngine>>(module, "StreamEngine",
                                                          py::release_gil_before_calling_cpp_dtor())
      .def_static(
          "join_links",
          [](const Communicator& comm, const DevicePtr& device, const LinkJoining& links) {
            return attached(comm, joinLinks(comm, device, links));
          },
          py::arg("comm"), py::arg("device"), py::arg("links"), Unlocked())
      .def_static(
          "join_nccl",
          [](const Communicator& comm, const DevicePtr& device, const NcclJoining& nccl) {
            return attached(comm, joinNccl(comm, device, nccl));
          },
          py::arg("comm"), py::arg("device"), py::arg("nccl"), Unlocked())
      .def_static(
          "join_paths",
          [](const Communicator& comm, const DevicePtr& device, const LinkJoining& links,
             const NcclJoining& nccl) {
            return attached(comm, joinPaths(comm, device, links, nccl));
          },
          py::arg("comm"), py::arg("device"), py::arg("links"), py::arg("nccl"), Unlocked())
      .def_property_readonly("name", &StreamEngine::name)
      .def(
          "reads_peers",
          [](const StreamEngine& engine, const Communicator& comm) {
            return engine.planning(comm.ranks()).peer_reads;
          },
          py::arg("comm"))
      .def(
          "lands",
          [](const StreamEngine& engine, const Communicator& comm, int peer) {
            return engine.lands(comm.globalRank(peer, "lands"));
          },
          py::arg("comm"), py::arg("peer"))
      .def("landing",
           [](const StreamEngine& engine) {
             const auto zone = engine.zone();
             return py::make_tuple(reinterpret_cast<uintptr_t>(zone.data), zone.bytes);
           })
      .def_property_readonly("device", &StreamEngine::device)
      .def_property_readonly("host_stream",
                             [](const StreamEngine& engine) { return engine.hostStream().handle; })
      .def(
          "synchronize",
          [](StreamEngine& engine, double timeout_s) {
            const GilRelease release;
            engine.waitForAll(timeout_s, checkSignals);
          },
          py::arg("timeout"))
      .def("stats", &StreamEngine::stats, Unlocked())
      .def(
          "waited_s",
          [](StreamEngine& engine, const Communicator& comm) {
            return engine.waitedSeconds(comm.sharedRanks());
          },
          py::arg("comm"), Unlocked());
}

}  // namespace hdpcomm
