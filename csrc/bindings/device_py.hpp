// The line of Python that called an operation of a device.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/rooms.hpp"
#include "device/device_api.hpp"

namespace hdpcomm {

// The calling line of Python. Needs the GIL. Visible to hdpcomm.testing._native, so that a file has
// one name in both modules.
[[gnu::visibility("default")]] Site callSite();

// Runs `call(site)` without the GIL, with the site of the Python caller.
template <typename Call>
auto atSite(Call call) {
  const Site site = callSite();
  const GilRelease release;
  return call(site);
}

// What export_memory returned. Throws InvalidUsage for other bytes.
MemoryHandle handleOf(const pybind11::bytes& bytes);

// Memory that tensors view (device_memory_py.cpp).
void bindDeviceMemory(pybind11::module_& module);

}  // namespace hdpcomm
