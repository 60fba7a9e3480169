#include "device/accumulate.hpp"

#include "base/error.hpp"

namespace hdpcomm {

#ifndef HDPCOMM_WITH_CUDA
void detail::accumulateCuda(uint32_t*, const uint32_t*, size_t, void*) {
  throw Error(ErrorKind::kDevice, "this build of hdpcomm has no CUDA kernels");
}
#endif

KernelLaunch accumulateKernel(uint32_t* dst, const uint32_t* src, size_t count) {
  KernelLaunch kernel;
  kernel.name = "accumulate";
  kernel.reads = {{src, count * sizeof *src}, {dst, count * sizeof *dst}};
  kernel.writes = {{dst, count * sizeof *dst}};
  kernel.cpu = [=] {
    for (size_t i = 0; i < count; ++i) dst[i] += src[i];
  };
  kernel.cuda = [=](void* stream) { detail::accumulateCuda(dst, src, count, stream); };
  return kernel;
}

}  // namespace hdpcomm
