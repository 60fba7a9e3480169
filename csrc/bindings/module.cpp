#include "bindings/rooms.hpp"

// Types that others take or return come first, so that signatures name them.
PYBIND11_MODULE(_core, module) {
  using namespace hdpcomm;
  module.doc() = "The C++ core of hdpcomm: one submodule a room, and what they share.";
  bindBase(module);
  const auto room = [&module](const char* name, void (*bind)(pybind11::module_&)) {
    auto submodule = module.def_submodule(name);
    bind(submodule);
  };
  room("planner", bindPlanner);
  room("kernels", bindKernels);
  room("collective", bindCollective);
  room("device", bindDevice);
  room("offload", bindOffload);
  room("transport", bindTransport);
  room("comm", bindComm);
}
