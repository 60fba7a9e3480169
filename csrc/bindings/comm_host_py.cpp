// SharedCounter, whose call is a plain CPython function, as in comm_calls_py.cpp, and Window:
// memory that the ranks of a host map.
#include "bindings/comm_py.hpp"
#include "comm/host/counter.hpp"
#include "comm/host/window.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// (counter, amount) -> the count before. Within a host it takes less time than to let go of the GIL
// and take it again, and never blocks.
PyObject* fetchAdd(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    expect(count, 2);
    auto& counter = py::cast<SharedCounter&>(py::handle(args[0]));
    const int64_t amount = integer(args[1]);
    std::optional<uint32_t> before = counter.fetchAddHere(amount);
    if (!before) {
      const GilRelease release;
      before = counter.fetchAdd(amount, kCheckSignals);
    }
    return PyLong_FromUnsignedLong(*before);
  });
}

PyMethodDef calls[] = {
    {"fetch_add", function(fetchAdd), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bindCounter(py::module_& module) {
  using Unlocked = py::call_guard<GilRelease>;
  py::class_<SharedCounter, std::shared_ptr<SharedCounter>>(
      module, "SharedCounter", py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("word", &SharedCounter::word)
      .def_property_readonly("generation", &SharedCounter::generation)
      .def_property_readonly("owner", &SharedCounter::owner)
      .def("close", &SharedCounter::close, Unlocked());
  module.def(
      "open_counter",
      [](const Communicator& comm) { return std::make_shared<SharedCounter>(comm); },
      py::arg("comm"), Unlocked());
  module.def(
      "join_counter",
      [](const Communicator& comm, int64_t word, int64_t generation) {
        return std::make_shared<SharedCounter>(comm, word, generation);
      },
      py::arg("comm"), py::arg("word"), py::arg("generation"), Unlocked());
  if (PyModule_AddFunctions(module.ptr(), calls) != 0) throw py::error_already_set();
}

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
