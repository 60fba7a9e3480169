// One function a file of bindings; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

namespace hdpcomm::testing {

void bindSchedules(pybind11::module_& module);
void bindPairFailures(pybind11::module_& module);
void bindDeviceCheck(pybind11::module_& module);
void bindDevices(pybind11::module_& module);
void bindFuzz(pybind11::module_& module);
void bindNccl(pybind11::module_& module);
void bindFrames(pybind11::module_& module);
void bindViews(pybind11::module_& module);
void bindSearches(pybind11::module_& module);

}  // namespace hdpcomm::testing
