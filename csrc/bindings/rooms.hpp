// One function a room; module.cpp calls them all. A room's bindings live in <room>_py.cpp,
// those of a large one in <room>_*_py.cpp, too.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include "base/error.hpp"

namespace hdpcomm {

// Whether the interpreter ends: a thread that takes the GIL from then on is ended by Python.
inline bool interpreterEnds() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Runs code without the GIL. In place of pybind11's, whose destructor ends the process
// (std::terminate) where Python ends a daemon thread that comes back from a call while the
// interpreter ends: such a thread sleeps for the rest of the process.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() noexcept(false) {
    while (interpreterEnds() && ::getpid() != ::gettid()) ::pause();  // not the main thread
    PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

// Sets the Python exception (hdpcomm.errors) of an error of the core.
void setPythonError(const Error& error) noexcept;
// Any string of Python as plain text; surrogates, as of names of files that are no UTF-8, become
// question marks.
std::string givenText(const pybind11::str& text);
// Called while waiting, without the GIL: throws when Ctrl-C was pressed.
void checkSignals();

void bindBase(pybind11::module_& module);
void bindSettings(pybind11::module_& module);  // base_settings_py.cpp
void bindCollective(pybind11::module_& module);
void bindComm(pybind11::module_& module);
void bindDevice(pybind11::module_& module);
void bindKernels(pybind11::module_& module);
void bindOffload(pybind11::module_& module);
void bindPlanner(pybind11::module_& module);
void bindTransport(pybind11::module_& module);

}  // namespace hdpcomm
