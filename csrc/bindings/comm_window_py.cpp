// Window: memory that the ranks of a host map.
#include "bindings/comm_py.hpp"
#include "comm/host/window.hpp"

namespace py = pybind11;

namespace hdpcomm {

void bindWindow(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
  py::class_<Window, std::shared_ptr<Window>>(module, "Window",
                                              py::release_gil_before_calling_cpp_dtor())
      .def(py::init<const Communicator&, size_t, size_t>(), py::arg("comm"), py::arg("words"),
           py::arg("bytes"), Unlocked())
      .def_property_readonly("descriptor", &Window::descriptor)
      .def("open", &Window::open, py::arg("position"), py::arg("pid"), py::arg("descriptor"),
           Unlocked())
      .def(
          "data",
          [](const Window& window, int position) {
            return Block{window.data(position), window.bytes()};
          },
          py::arg("position"))
      .def("set", &Window::set, py::arg("position"), py::arg("word"), py::arg("value"))
      .def("get", &Window::get, py::arg("position"), py::arg("word"))
      .def(
          "wait",
          [](Window& window, int position, size_t word, uint32_t value, int awaited) {
            window.wait(position, word, value, awaited, kCheckSignals);
          },
          py::arg("position"), py::arg("word"), py::arg("value"), py::arg("awaited"), Unlocked())
      .def("start", &Window::start)
      .def("stop", &Window::stop);
}

}  // namespace hdpcomm
