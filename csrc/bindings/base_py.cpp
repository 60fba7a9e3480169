#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "bindings/rooms.hpp"

namespace py = pybind11;

namespace hdpcomm {
namespace {

const char* pythonClass(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidUsage:
      return "InvalidUsage";
    case ErrorKind::kTimeout:
      return "CommTimeout";
    case ErrorKind::kPeerLost:
      return "PeerLost";
    case ErrorKind::kMismatch:
      return "Mismatch";
    case ErrorKind::kAborted:
      return "Aborted";
    case ErrorKind::kDevice:
      return "DeviceError";
    case ErrorKind::kInternal:
      break;
  }
  return "Error";
}

// The classes live in Python (hdpcomm.errors): they have several bases, which CPython exceptions
// made in C++ cannot have.
void makePythonError(const Error& error) {
  const py::object cls = py::module_::import("hdpcomm.errors").attr(pythonClass(error.kind()));
  const ErrorContext& context = error.context();
  const auto known = [](int64_t value) -> py::object {
    return value < 0 ? py::object(py::none()) : py::object(py::int_(value));
  };
  const py::object instance = cls(
      error.what(), py::arg("rank") = known(context.rank), py::arg("peer") = known(context.peer),
      py::arg("op") = context.op.empty() ? py::object(py::none()) : py::object(py::str(context.op)),
      py::arg("ranks") = context.ranks.empty() ? py::object(py::none())
                                               : py::object(py::tuple(py::cast(context.ranks))),
      py::arg("seq") = known(context.seq));
  py::module_::import("hdpcomm.errors").attr("_raised")(instance);
  PyErr_SetObject(cls.ptr(), instance.ptr());
}

// The interpreter's end cuts off a thread that comes back into it, by pthread_exit. Where that
// meets a noexcept function of others' bindings, it is std::terminate, and the process has SIGABRT
// in place of its exit code. From this call on such a thread waits for the end of the process.
void outlastLateThreads() {
  static std::terminate_handler usual = nullptr;
  usual = std::set_terminate([] {
    const bool main_thread = ::syscall(SYS_gettid) == ::getpid();
    while (!main_thread && std::current_exception() == nullptr) ::pause();
    usual();
  });
}

}  // namespace

// Its callers are C functions of Python, which nothing may leave.
void setPythonError(const Error& error) noexcept {
  try {
    makePythonError(error);
  } catch (py::error_already_set& other) {  // Ctrl-C, no memory, what a listener raised
    other.restore();
  } catch (const std::exception& other) {
    PyErr_SetString(PyExc_RuntimeError, other.what());
  }
}

std::string givenText(const py::str& text) {
  const auto bytes =
      py::reinterpret_steal<py::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes) throw py::error_already_set();
  return plainText(std::string_view(bytes));
}

void bindBase(py::module_& module) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      setPythonError(error);
    }
  });
  module.def("build_info", [] {
    py::dict info;
    info["compiler"] = __VERSION__;
#ifdef HDPCOMM_WITH_CUDA
    info["cuda"] = HDPCOMM_CUDA_VERSION;
#else
    info["cuda"] = py::none();
#endif
    return info;
  });
  module.def("outlast_late_threads", outlastLateThreads);
  bindSettings(module);
  py::dict dtypes;
  for (int i = 0; i < kNumDTypes; ++i) dtypes[dtypeName(static_cast<DType>(i))] = i;
  module.attr("DTYPES") = dtypes;
}

}  // namespace hdpcomm
