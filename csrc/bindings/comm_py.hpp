// What the files of the comm room's bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include "hdpcomm/comm/communicator.hpp"

namespace hdpcomm {

// Blocking operations and describe_torch (calls_py.cpp).
void bindCalls(pybind11::module_& module);
// For tests (pair_failures_py.cpp).
void bindPairFailures(pybind11::module_& module);

}  // namespace hdpcomm
