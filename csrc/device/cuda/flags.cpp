#include "base/error.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/loading.hpp"

#ifndef HDPCOMM_WITH_CUDA

namespace hdpcomm::cuda {
namespace {

[[noreturn]] void throwNoKernels() {
  throw Error(ErrorKind::kDevice,
              "this driver has no stream memory operations, and this build of hdpcomm has no "
              "kernels to replace them: build it with a CUDA compiler");
}

}  // namespace

void launchWriteValue(uint32_t*, uint32_t, void*) { throwNoKernels(); }
void launchWaitValue(const uint32_t*, uint32_t, void*) { throwNoKernels(); }
void loadKernels() {}  // there are none

}  // namespace hdpcomm::cuda

#endif
