// How a world begins and how it ends.
#include <pybind11/stl.h>

#include "base/process.hpp"
#include "bindings/comm_py.hpp"
#include "transport/host/composite.hpp"
#include "transport/host/framed/frame_link.hpp"
#include "transport/host/shm/shm.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

std::shared_ptr<World> joinShmWorld(const std::shared_ptr<ShmSegment>& segment, int rank,
                                    double timeout_s, double joining_s, std::vector<int> pids) {
  const GilRelease release;
  auto transport = makeShmTransport(segment, rank);
  shmWaitAllReady(*transport, {joining_s, std::move(pids), checkSignals});
  return std::make_shared<World>(std::move(transport), timeout_s);
}

// Joins by shared memory with the ranks of this host, and by frames with all others.
std::shared_ptr<World> joinHosts(const std::shared_ptr<ShmSegment>& segment,
                                 const std::shared_ptr<FrameLink>& link,
                                 const std::vector<int>& host_of_rank, double timeout_s,
                                 double joining_s, std::vector<int> pids) {
  const GilRelease release;
  const int rank = link->rank();
  std::vector<int> members;
  std::vector<int> route;
  for (size_t i = 0; i < host_of_rank.size(); ++i) {
    const bool here = host_of_rank[i] == host_of_rank.at(static_cast<size_t>(rank));
    if (here) members.push_back(static_cast<int>(i));
    route.push_back(here ? 0 : 1);
  }
  auto local = makeShmTransport(segment, rank, members);
  shmWaitAllReady(*local, {joining_s, std::move(pids), checkSignals});
  link->setWake(local->waker());
  link->serveCounters(local->counterWords(rank));
  std::vector<std::unique_ptr<Transport>> parts;
  parts.push_back(std::move(local));
  parts.push_back(makeFramedTransport(link));
  return std::make_shared<World>(
      makeCompositeTransport(std::move(parts), std::move(route), "shm+tcp"), timeout_s);
}

// The worlds of this process that are still open, to close them when it ends. Python's wrappers may
// be gone by then.
class OpenWorlds {
 public:
  void add(const std::shared_ptr<World>& world) {
    const std::lock_guard lock(mutex_);
    std::erase_if(worlds_, [](const auto& each) { return each.expired(); });
    worlds_.push_back(world);
  }
  void close(const std::string& reason) {
    std::vector<std::weak_ptr<World>> worlds;
    {
      const std::lock_guard lock(mutex_);
      worlds.swap(worlds_);
    }
    for (const auto& each : worlds) {
      if (const auto world = each.lock()) world->close(reason);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<World>> worlds_;
};

OpenWorlds& openWorlds() {
  static OpenWorlds worlds;
  return worlds;
}

}  // namespace

void bindJoining(py::module_& module) {
  module.def("host_identity", &hostIdentity);
  module.def("process_runs", &processRuns, py::arg("pid"));
  module.def("join_shm_world", &joinShmWorld, py::arg("segment"), py::arg("rank"),
             py::arg("timeout"), py::arg("joining"), py::arg("pids") = std::vector<int>());
  module.def(
      "join_framed_world",
      [](const std::shared_ptr<FrameLink>& link, double timeout_s) {
        return std::make_shared<World>(makeFramedTransport(link), timeout_s);
      },
      py::arg("link"), py::arg("timeout"));
  module.def("join_hosts", &joinHosts, py::arg("segment"), py::arg("link"), py::arg("host_of_rank"),
             py::arg("timeout"), py::arg("joining"), py::arg("pids") = std::vector<int>());
  module.def(
      "close_at_end", [](const std::shared_ptr<World>& world) { openWorlds().add(world); },
      py::arg("world"));
  module.def(
      "close_worlds",
      [](const py::str& reason) {
        const std::string text = givenText(reason);
        const GilRelease release;
        openWorlds().close(text);
      },
      py::arg("reason"));
}

}  // namespace hdpcomm
