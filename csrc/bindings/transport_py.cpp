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

py::memoryview viewOf(std::byte* data, size_t bytes) {
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes), false);
}

void bindSegment(py::module_& module) {
  py::class_<ShmSegment, std::shared_ptr<ShmSegment>>(module, "ShmSegment")
      .def("address", &ShmSegment::address)
      .def("release", &ShmSegment::release);
  module.def("segment_bytes", &shmSegmentBytes, py::arg("num_ranks"));
  module.def("create_segment", &createShmSegment, py::arg("num_ranks"));
  module.def("open_segment", &openShmSegment, py::arg("address"), py::arg("num_ranks"));
}

void bindFrames(py::module_& module) {
  // The views do not keep the frame alive: whoever uses them holds it.
  py::class_<Frame, FramePtr>(module, "Frame")
      .def(py::init<>())
      .def_property_readonly("head", [](Frame& f) { return viewOf(f.head(), kFrameHeadBytes); })
      .def_property_readonly("bulk", [](Frame& f) { return viewOf(f.bulk(), f.bulkBytes()); })
      .def_property_readonly("bulk_bytes", &Frame::bulkBytes)
      .def_property_readonly("more", &Frame::more)
      .def("expect_bulk", &Frame::expectBulk);
  using Unlocked = py::call_guard<GilRelease>;
  py::class_<FrameLink, std::shared_ptr<FrameLink>>(module, "FrameLink")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def_property_readonly("rank", &FrameLink::rank)
      .def_property_readonly("size", &FrameLink::size)
      .def(
          "try_next",
          [](FrameLink& link, int peer) -> std::pair<bool, FramePtr> {
            std::optional<FramePtr> frame = link.tryNext(peer);
            return {frame.has_value(), frame.value_or(nullptr)};
          },
          py::arg("peer"), Unlocked())
      .def("next", &FrameLink::next, py::arg("peer"), Unlocked())
      .def("deliver", &FrameLink::deliver, py::arg("peer"), py::arg("frame"), Unlocked())
      .def_property_readonly("closed", &FrameLink::closed)
      .def("wait_closed", &FrameLink::waitClosed, Unlocked())
      .def("lost", &FrameLink::lost, py::arg("peer"), py::arg("why"), Unlocked());
}

void bindSocketCarrier(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
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
  bindSocketCarrier(module);
  bindNccl(module);
}

}  // namespace hdpcomm
