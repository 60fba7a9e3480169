// Frames between hosts, for tests that carry them by hand, change them or make their own.
#include <pybind11/stl.h>

#include <chrono>
#include <thread>

#include "bindings/rooms.hpp"
#include "testing/module.hpp"
#include "transport/host/framed/frame.hpp"

namespace py = pybind11;

namespace hdpcomm::testing {
namespace {

py::memoryview viewOf(std::byte* data, size_t bytes) {
  return py::memoryview::from_memory(data, static_cast<py::ssize_t>(bytes), false);
}

// Waits for a frame; null after the last one, or if the peer was lost.
FramePtr nextFrame(FrameLink& link, int peer) {
  for (;;) {
    if (std::optional<FramePtr> frame = link.tryNext(peer)) return *frame;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

void bindFrames(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
  module.attr("FRAME_HEAD_BYTES") = kFrameHeadBytes;
  module.attr("FRAME_MAGIC") = framed::kMagic;
  // The views do not keep the frame alive: whoever uses them holds it.
  py::class_<Frame, FramePtr>(module, "Frame")
      .def(py::init<>())
      .def_property_readonly("head", [](Frame& f) { return viewOf(f.head(), kFrameHeadBytes); })
      .def_property_readonly("bulk", [](Frame& f) { return viewOf(f.bulk(), f.bulkBytes()); })
      .def_property_readonly("bulk_bytes", &Frame::bulkBytes)
      .def("expect_bulk", &Frame::expectBulk);
  module.def("next_frame", &nextFrame, py::arg("link"), py::arg("peer"), Unlocked());
  module.def(
      "waiting_frames",
      [](FrameLink& link, int peer) {
        std::vector<FramePtr> frames;
        for (auto next = link.tryNext(peer); next && *next; next = link.tryNext(peer)) {
          frames.push_back(*next);
        }
        return frames;
      },
      py::arg("link"), py::arg("peer"), Unlocked());
  module.def("deliver_frame", &FrameLink::deliver, py::arg("link"), py::arg("peer"),
             py::arg("frame"), Unlocked());
  module.def("lose_peer", &FrameLink::lost, py::arg("link"), py::arg("peer"), py::arg("why"),
             Unlocked());
}

}  // namespace hdpcomm::testing
