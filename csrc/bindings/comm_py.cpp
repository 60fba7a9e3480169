// World, Communicator and Work. Buffers come as addresses; hdpcomm/comm/tensors.py checks them and
// keeps them alive.
#include "bindings/comm_py.hpp"

#include <pybind11/stl.h>

#include <numeric>

#include "bindings/rooms.hpp"
#include "collective/peer_reads.hpp"
#include "comm/stream/stream_engine.hpp"
#include "transport/failures.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

void wait(Handle& handle, double timeout_s, bool quiet) {
  {
    const GilRelease release;
    if (quiet) handle.work->keepQuiet();
    handle.world->wait(*handle.work, timeout_s, kCheckSignals);
  }
  handle.releaseBuffers();
}

bool done(const Handle& handle) {
  const GilRelease release;
  return handle.done();
}

void bindCommunicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("ranks",
                             [](const Communicator& c) { return py::tuple(py::cast(c.ranks())); })
      .def_property_readonly("hash", &Communicator::hash)
      .def(
          "waited_s",
          [](const Communicator& comm) { return comm.world().waitedSeconds(comm.sharedRanks()); },
          py::call_guard<GilRelease>())
      .def_property_readonly("world", &Communicator::sharedWorld)
      .def(
          "resync",
          [](const Communicator& c, double timeout_s, bool quiet) {
            const GilRelease release;
            c.resync(timeout_s, kCheckSignals, quiet);
          },
          py::arg("timeout"), py::arg("quiet") = false);
}

bool hasLeft(World& world, int rank) {
  if (rank < 0 || rank >= world.size()) {
    throwInvalidUsage("has_left() got rank " + std::to_string(rank) + "; this world has ranks 0.." +
                      std::to_string(world.size() - 1));
  }
  return world.departure(rank).has_value();
}

// The node of every rank.
std::vector<int> nodesOf(const World& world) {
  std::vector<int> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const std::vector<int> nodes = world.schedules().nodesOf(ranks);
  return nodes.empty() ? std::vector<int>(ranks.size()) : nodes;
}

std::optional<Block> allocate(World& world, size_t bytes) {
  std::shared_ptr<std::byte> data;
  {
    const GilRelease release;
    data = world.allocate(bytes);
  }
  if (!data) return std::nullopt;
  return Block{std::move(data), bytes};
}

auto ending(void (World::*end)(const std::string&)) {
  return [end](World& world, const py::str& reason) {
    const std::string text = givenText(reason);
    const GilRelease release;
    (world.*end)(text);
  };
}

void bindWorld(py::module_& module) {
  py::class_<Block>(module, "Block", py::buffer_protocol()).def_buffer([](Block& block) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(block.data.get()),
                           static_cast<py::ssize_t>(block.bytes));
  });
  py::class_<World, std::shared_ptr<World>>(module, "World",
                                            py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("timeout", &World::timeout)
      .def_property_readonly("transport", &World::transportName)
      .def_property_readonly("over", &World::over)
      .def(
          "communicator",
          [](const std::shared_ptr<World>& world) { return std::make_shared<Communicator>(world); })
      // The world's lock may be held while another thread copies or waits for a copy.
      .def("stats", &World::stats, py::call_guard<GilRelease>())
      .def("allocate", &allocate, py::arg("bytes"))
      .def(
          "set_costs",
          [](World& world, double alpha_s, double message_s, double beta_s_per_byte,
             double gamma_s_per_byte) {
            world.schedules().setCosts({alpha_s, message_s, beta_s_per_byte, gamma_s_per_byte});
          },
          py::arg("alpha_s"), py::arg("message_s"), py::arg("beta_s_per_byte"),
          py::arg("gamma_s_per_byte"))
      .def(
          "set_nodes",
          [](World& world, std::vector<int> node_of_rank, const LinkCosts& remote) {
            world.schedules().setNodes(std::move(node_of_rank),
                                       std::make_from_tuple<TransportCosts>(remote));
          },
          py::arg("node_of_rank"), py::arg("remote_costs"))
      .def("nodes", &nodesOf)
      .def("has_left", &hasLeft, py::arg("rank"), py::call_guard<GilRelease>())
      .def("go_by_liveness", &World::goByLiveness, py::arg("on"), py::call_guard<GilRelease>())
      .def("tick", &World::tick, py::call_guard<GilRelease>())
      .def("begin_activity", &World::beginActivity, py::arg("what"), py::arg("limit_s"),
           py::call_guard<GilRelease>())
      .def("end_activity", &World::endActivity, py::arg("activity"), py::call_guard<GilRelease>())
      .def("abort", ending(&World::abort), py::arg("reason"))
      .def("close", ending(&World::close), py::arg("reason"));
}

// What a world or an engine has recorded, as long as it exists.
struct FlightSource {
  std::function<std::optional<FlightRecorder::Flight>()> read;
  std::function<bool()> gone;
};

template <typename Recorded>
FlightSource sourceOf(const std::shared_ptr<Recorded>& recorded) {
  const std::weak_ptr weak(recorded);
  return {[weak]() -> std::optional<FlightRecorder::Flight> {
            const auto held = weak.lock();
            return held ? std::optional(held->flight()) : std::nullopt;
          },
          [weak] { return weak.expired(); }};
}

void bindFlight(py::module_& module) {
  using Flight = FlightRecorder::Flight;
  py::class_<FlightRecord>(module, "FlightRecord")
      .def_property_readonly("op", [](const FlightRecord& r) { return opName(r.call.op); })
      .def_property_readonly("subset", [](const FlightRecord& r) { return r.call.subset_hash; })
      .def_property_readonly("count", [](const FlightRecord& r) { return r.call.count; })
      .def_property_readonly("dtype", [](const FlightRecord& r) { return dtypeName(r.call.dtype); })
      .def_property_readonly("root", [](const FlightRecord& r) { return int{r.call.root}; })
      .def_property_readonly("state",
                             [](const FlightRecord& r) { return static_cast<int>(r.state); })
      .def_readonly("started_ns", &FlightRecord::started)
      .def_readonly("ended_ns", &FlightRecord::ended)
      .def_readonly("seq", &FlightRecord::seq)
      .def_readonly("order", &FlightRecord::order)
      .def_readonly("peer", &FlightRecord::peer)
      .def_readonly("sends", &FlightRecord::sends);
  py::class_<FlightSource>(module, "FlightSource")
      .def("read",
           [](const FlightSource& source) {
             const GilRelease release;
             return source.read();
           })
      .def_property_readonly("gone", [](const FlightSource& source) { return source.gone(); });
  module.def("flight_of_world", &sourceOf<World>, py::arg("world"));
  module.def("flight_of_engine", &sourceOf<StreamEngine>, py::arg("engine"));
  py::class_<Flight>(module, "Flight")
      .def_readonly("first", &Flight::first)
      .def_readonly("records", &Flight::records)
      .def_readonly("groups", &Flight::groups);
}

// The numbers of operations, reductions and algorithms, and which algorithms an operation has.
void bindNames(py::module_& module) {
  py::dict ops;
  for (int i = 0; i <= static_cast<int>(OpCode::kAllToAll); ++i)
    ops[opName(static_cast<OpCode>(i))] = i;
  module.attr("OPS") = ops;
  py::dict redops;
  for (int i = 0; i <= static_cast<int>(RedOp::kAvg); ++i)
    redops[redOpName(static_cast<RedOp>(i))] = i;
  module.attr("REDOPS") = redops;
  py::dict algorithms;
  for (int i = 0; i < kNumAlgorithms; ++i) algorithms[algorithmName(static_cast<Algorithm>(i))] = i;
  module.attr("ALGORITHMS") = algorithms;
  const auto names_by = [](auto algorithms) {
    return [algorithms](int op) {
      std::vector<std::string> names;
      for (const Algorithm each : algorithms(static_cast<OpCode>(op)))
        names.push_back(algorithmName(each));
      return names;
    };
  };
  module.def("algorithms_of", names_by(algorithmsOf), py::arg("op"));
  module.def("peer_readers_of", names_by(peerReadersOf), py::arg("op"));
}

}  // namespace

// Unheard: no operation has raised an error with the same cause, which is the death of that rank,
// or the same failure of this rank or another one. Nor is Aborted told, which follows from close()
// or from an error that was told before.
std::optional<std::string> Handle::unheardError() const {
  if (world->heard(*work)) return std::nullopt;
  try {
    world->wait(*work, -1.0, {});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kAborted && error.kind() != ErrorKind::kInvalidUsage)
      return error.what();
  } catch (const std::exception&) {  // no memory to tell of it
  }
  return std::nullopt;
}

void bindComm(py::module_& module) {
  module.attr("OUT_OF_STEP_ADVICE") = kOutOfStepAdvice;
  InFlightClass<Handle>(module, "Work")
      .def("wait", &wait, py::arg("timeout") = -1.0, py::arg("quiet") = false)
      .def("done", &done)
      .def("__repr__",
           [](const Handle& handle) { return "<Work " + handle.work->describeCall() + ">"; });
  module.def("free_ended", &sweepLetGo);
  bindFlight(module);
  bindCalls(module);
  bindTensors(module);
  bindWorld(module);
  bindJoining(module);
  bindStream(module);
  bindCommunicator(module);
  bindCounter(module);
  bindWindow(module);
  bindNames(module);
}

}  // namespace hdpcomm
