// One function a room; module.cpp calls them all. A room's bindings live in <room>_py.cpp,
// those of a large one in <room>_*_py.cpp, too.
#pragma once

#include <pybind11/pybind11.h>

#include "base/error.hpp"

namespace hdpcomm {

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
