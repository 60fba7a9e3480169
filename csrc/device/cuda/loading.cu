#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/loading.hpp"

namespace hdpcomm::cuda {
namespace {

std::vector<const void*>& kernels() {
  static auto* all = new std::vector<const void*>;
  return *all;
}

}  // namespace

bool enterKernel(const void* kernel) {
  kernels().push_back(kernel);
  return true;
}

void loadKernels() {
  for (const void* kernel : kernels()) {
    cudaFuncAttributes unused{};
    const cudaError_t status = cudaFuncGetAttributes(&unused, kernel);
    if (status != cudaSuccess) {
      throw Error(ErrorKind::kDevice,
                  std::string("a CUDA kernel cannot be loaded: ") + cudaGetErrorString(status) +
                      "; this build has code for other GPUs: build it on this machine, or with "
                      "its compute capability in CMAKE_CUDA_ARCHITECTURES");
    }
  }
}

}  // namespace hdpcomm::cuda
