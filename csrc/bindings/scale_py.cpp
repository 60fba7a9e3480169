// Worlds of several hosts: frames for a carrier written in Python, and the world over them.
#include <pybind11/stl.h>

#include "hdpcomm/comm/world.hpp"
#include "hdpcomm/transport/frame_link.hpp"
#include "rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

py::memoryview viewOf(std::byte* data, size_t bytes) {
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes), false);
}

}  // namespace

void bindScale(py::module_& module) {
  module.attr("FRAME_HEAD_BYTES") = kFrameHeadBytes;
  // The views do not keep the frame alive: whoever uses them holds it.
  py::class_<Frame, FramePtr>(module, "Frame")
      .def(py::init<>())
      .def_property_readonly("head", [](Frame& f) { return viewOf(f.head(), kFrameHeadBytes); })
      .def_property_readonly("bulk", [](Frame& f) { return viewOf(f.bulk(), f.bulkBytes()); })
      .def_property_readonly("bulk_bytes", &Frame::bulkBytes)
      .def("expect_bulk", &Frame::expectBulk);
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<FrameLink, std::shared_ptr<FrameLink>>(module, "FrameLink")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("size"))
      .def_property_readonly("rank", &FrameLink::rank)
      .def_property_readonly("size", &FrameLink::size)
      .def("next", &FrameLink::next, py::arg("peer"), Unlocked())
      .def("deliver", &FrameLink::deliver, py::arg("peer"), py::arg("frame"), Unlocked())
      .def("wait_closed", &FrameLink::waitClosed, Unlocked())
      .def("lost", &FrameLink::lost, py::arg("peer"), py::arg("why"), Unlocked());
  module.def(
      "join_framed_world",
      [](const std::shared_ptr<FrameLink>& link, const std::string& name, double timeout_s) {
        return std::make_shared<World>(makeFramedTransport(link, name), timeout_s);
      },
      py::arg("link"), py::arg("name"), py::arg("timeout"));
}

}  // namespace hdpcomm
