#include "testing/module.hpp"

PYBIND11_MODULE(_native, module) {
  using namespace hdpcomm::testing;
  module.doc() = "What only tests need: fakes, checkers and views into the core.";
  pybind11::module_::import("hdpcomm._core");  // has the types that are taken and returned here
  bindSchedules(module);
  bindPairFailures(module);
  bindDeviceCheck(module);
  bindDevices(module);
  bindFuzz(module);
  bindNccl(module);
  bindFrames(module);
  bindViews(module);
  bindSearches(module);
}
