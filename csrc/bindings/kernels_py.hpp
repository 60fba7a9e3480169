// Shared by the files of the kernels' bindings: addresses, and the choice between a kernel's CPU
// and CUDA launcher.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace hdpcomm {

inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// Throws DeviceError: this build has no CUDA kernels.
[[noreturn]] void throwNoCuda();

// Called by bindKernels(); each is in the file of its name.
void bindKernelsBuffers(pybind11::module_& module);
void bindKernelsCrossEntropy(pybind11::module_& module);

}  // namespace hdpcomm

// Runs kernels::<name>Cuda(args, stream) or kernels::<name>Cpu(args, ...) by the caller's `cuda`
// and `stream`, without the GIL.
#ifdef HDPCOMM_WITH_CUDA
#define HDP_RUN_KERNEL(name, args, ...)                                              \
  const GilRelease hdp_release;                                                      \
  if (cuda) return ::hdpcomm::kernels::name##Cuda(args, ::hdpcomm::pointer(stream)); \
  ::hdpcomm::kernels::name##Cpu(args __VA_OPT__(, ) __VA_ARGS__)
#else
#define HDP_RUN_KERNEL(name, args, ...) \
  const GilRelease hdp_release;         \
  if (cuda) ::hdpcomm::throwNoCuda();   \
  static_cast<void>(stream);            \
  ::hdpcomm::kernels::name##Cpu(args __VA_OPT__(, ) __VA_ARGS__)
#endif
