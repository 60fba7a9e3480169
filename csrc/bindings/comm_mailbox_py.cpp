// Mailbox: messages with labels. Plain CPython functions, as in comm_calls_py.cpp.
#include "bindings/comm_py.hpp"
#include "comm/mailbox/mailbox.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// The object that Python holds: the message with its mailbox, so that either may be dropped first.
struct MailHandle {
  std::shared_ptr<Mailbox> mailbox;
  std::shared_ptr<LabelledWork> work;

  void wait(double timeout_s) const {
    const py::gil_scoped_release release;
    mailbox->wait(*work, timeout_s, kCheckSignals);
  }
  bool done() const {
    const py::gil_scoped_release release;
    return mailbox->test(*work);
  }
};

// One rank, or a sequence of some.
std::vector<int> ranksOf(PyObject* object) {
  if (PyLong_Check(object)) return {static_cast<int>(integer(object))};
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(object, "expected ranks to receive from"));
  if (!items) throw py::error_already_set();
  std::vector<int> ranks;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    ranks.push_back(static_cast<int>(integer(PySequence_Fast_GET_ITEM(items.ptr(), i))));
  }
  return ranks;
}

// (mailbox, buffer, rank or ranks, tag, context) -> the message; None, and nothing done, where the
// buffer is no plain tensor.
PyObject* start(PyObject* const* args, Py_ssize_t count, bool send) {
  return guarded([&]() -> PyObject* {
    expect(count, 5);
    const auto mailbox = py::cast<std::shared_ptr<Mailbox>>(py::handle(args[0]));
    TensorView buffer;
    if (!describePlain(args[1], &buffer) && !describeTuple(args[1], &buffer)) return nullptr;
    Message message{buffer.data, buffer.count, buffer.dtype, -1};
    const Label label{integer(args[4]), integer(args[3])};
    MailHandle handle{mailbox, nullptr};
    if (send) {
      message.peer = static_cast<int>(integer(args[2]));
      const py::gil_scoped_release release;
      handle.work = mailbox->send(message, label);
    } else {
      std::vector<int> sources = ranksOf(args[2]);
      const py::gil_scoped_release release;
      handle.work = mailbox->receive(message, std::move(sources), label);
    }
    return py::cast(std::move(handle)).release().ptr();
  });
}

PyObject* send(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return start(args, count, true);
}

PyObject* receive(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return start(args, count, false);
}

// (message, seconds)
PyObject* wait(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    expect(count, 2);
    const double timeout_s = PyFloat_AsDouble(args[1]);
    if (timeout_s == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    py::cast<const MailHandle&>(py::handle(args[0])).wait(timeout_s);
    return nullptr;
  });
}

PyMethodDef calls[] = {
    {"mail_send", function(send), METH_FASTCALL, nullptr},
    {"mail_receive", function(receive), METH_FASTCALL, nullptr},
    {"mail_wait", function(wait), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bindMailbox(py::module_& module) {
  py::class_<Mailbox, std::shared_ptr<Mailbox>>(module, "Mailbox")
      .def(py::init<std::shared_ptr<World>>(), py::arg("world"));
  py::class_<MailHandle>(module, "Mail")
      .def("done", &MailHandle::done)
      .def_property_readonly("receives",
                             [](const MailHandle& mail) { return mail.work->receives(); })
      .def_property_readonly("source", [](const MailHandle& mail) { return mail.work->source(); })
      .def("__repr__",
           [](const MailHandle& mail) { return "<Mail " + mail.work->describeCall() + ">"; });
  if (PyModule_AddFunctions(module.ptr(), calls) != 0) throw py::error_already_set();
}

}  // namespace hdpcomm
