#include "bindings/rooms.hpp"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of hdpcomm.";
  hdpcomm::bindBase(module);
  auto planner = module.def_submodule("planner", "Solver of step plans.");
  hdpcomm::bindPlanner(planner);
  auto kernels = module.def_submodule("kernels");
  hdpcomm::bindKernels(kernels);
  auto comm = module.def_submodule("comm");
  hdpcomm::bindComm(comm);
  hdpcomm::bindStream(comm);
  auto collective = module.def_submodule("collective");
  hdpcomm::bindCollective(collective);
  auto scale = module.def_submodule("scale", "Worlds of several hosts.");
  hdpcomm::bindScale(scale);
  auto device = module.def_submodule("device");
  hdpcomm::bindDevice(device);
  auto offload = module.def_submodule("offload");
  hdpcomm::bindOffload(offload);
}
