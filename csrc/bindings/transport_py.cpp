// Segments of shared memory, frames and who carries them, and the NCCL library.
#include <pybind11/stl.h>

#include "bindings/rooms.hpp"
#include "transport/host/framed/frame_link.hpp"
#include "transport/host/framed/socket_carrier.hpp"
#include "transport/host/shm/shm.hpp"
#include "transport/stream/nccl/nccl_api.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

void bindSegment(py::module_& module) {
  py::class_<ShmSegment, std::shared_ptr<ShmSegment>>(module, "ShmSegment")
      .def("address", &ShmSegment::address)
      .def("release", &ShmSegment::release);
  module.def("segment_bytes", &shmSegmentBytes, py::arg("num_ranks"));
  module.def("create_segment", &createShmSegment, py::arg("num_ranks"));
  module.def("open_segment", &openShmSegment, py::arg("address"), py::arg("num_ranks"));
}

void bindFrames(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
  py::class_<FrameLink, std::shared_ptr<FrameLink>>(module, "FrameLink")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def_property_readonly("rank", &FrameLink::rank)
      .def_property_readonly("size", &FrameLink::size)
      .def_property_readonly("closed", &FrameLink::closed);
  py::class_<SocketCarrier, std::shared_ptr<SocketCarrier>>(module, "SocketCarrier")
      .def(py::init<std::shared_ptr<FrameLink>, double>(), py::arg("link"), py::arg("grace_s"))
      .def("wanted", &SocketCarrier::wanted, Unlocked())
      .def(
          "connected",
          [](SocketCarrier& carrier, int peer, int socket) { carrier.connected(peer, Fd(socket)); },
          py::arg("peer"), py::arg("socket"), Unlocked())
      .def(
          "accepted",
          [](SocketCarrier& carrier, int peer, int socket) {
            return carrier.accepted(peer, Fd(socket));
          },
          py::arg("peer"), py::arg("socket"), Unlocked())
      .def("unreachable", &SocketCarrier::unreachable, py::arg("peer"), py::arg("why"), Unlocked())
      .def("stop", &SocketCarrier::stop, Unlocked())
      .def("join", &SocketCarrier::join, py::arg("seconds"), Unlocked());
}

void bindNccl(py::module_& module) {
  module.def("nccl_version_text", &ncclVersionText, py::arg("version"));
  py::class_<NcclApi, std::shared_ptr<NcclApi>>(module, "NcclLibrary")
      .def_readonly("path", &NcclApi::path)
      .def_readonly("version", &NcclApi::version);
  module.def(
      "load_nccl",
      [](const std::vector<std::string>& candidates) {
        return std::const_pointer_cast<NcclApi>(loadNccl(candidates));
      },
      py::arg("candidates"));
}

}  // namespace

void bindTransport(py::module_& module) {
  bindSegment(module);
  bindFrames(module);
  bindNccl(module);
}

}  // namespace hdpcomm
