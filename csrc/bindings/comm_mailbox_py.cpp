// Mailbox: messages with labels. Plain CPython functions, as in comm_calls_py.cpp.
#include "bindings/comm_py.hpp"
#include "comm/mailbox/mailbox.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

// The object that Python holds: the message with its mailbox, so that either may be dropped first.
struct MailHandle final : InFlight {
  MailHandle(py::object buffers, std::shared_ptr<Mailbox> of_mailbox,
             std::shared_ptr<LabelledWork> started)
      : InFlight(std::move(buffers)), mailbox(std::move(of_mailbox)), work(std::move(started)) {}
  bool done() const override { return mailbox->test(*work); }

  std::shared_ptr<Mailbox> mailbox;
  std::shared_ptr<LabelledWork> work;
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

// (mailbox, buffer or its description, rank or ranks, tag, context, owner of the memory) -> the
// message; None, and nothing done, where the buffer is no plain tensor.
PyObject* start(PyObject* const* args, Py_ssize_t count, bool send) {
  return guarded([&]() -> PyObject* {
    expect(count, 6);
    const auto mailbox = py::cast<std::shared_ptr<Mailbox>>(py::handle(args[0]));
    TensorView buffer;
    if (!describePlain(args[1], &buffer) && !describeTuple(args[1], &buffer)) return nullptr;
    Message message{buffer.data, buffer.count, buffer.dtype, -1};
    const Label label{integer(args[4]), integer(args[3])};
    std::shared_ptr<LabelledWork> work;
    if (send) {
      message.peer = static_cast<int>(integer(args[2]));
      const GilRelease release;
      work = mailbox->send(message, label);
    } else {
      std::vector<int> sources = ranksOf(args[2]);
      const GilRelease release;
      work = mailbox->receive(message, std::move(sources), label);
    }
    return newInFlight<MailHandle>(py::reinterpret_borrow<py::object>(args[5]), mailbox,
                                   std::move(work));
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
    auto& mail = py::cast<MailHandle&>(py::handle(args[0]));
    {
      const GilRelease release;
      mail.mailbox->wait(*mail.work, timeout_s, kCheckSignals);
    }
    mail.releaseBuffers();
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
  InFlightClass<MailHandle>(module, "Mail")
      .def("done",
           [](const MailHandle& mail) {
             const GilRelease release;
             return mail.done();
           })
      .def_property_readonly("receives",
                             [](const MailHandle& mail) { return mail.work->receives(); })
      .def_property_readonly("source", [](const MailHandle& mail) { return mail.work->source(); })
      .def("__repr__",
           [](const MailHandle& mail) { return "<Mail " + mail.work->describeCall() + ">"; });
  if (PyModule_AddFunctions(module.ptr(), calls) != 0) throw py::error_already_set();
}

}  // namespace hdpcomm
