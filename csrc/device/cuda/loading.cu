#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "device/cuda/driver.hpp"
#include "device/cuda/loading.hpp"

namespace hdpcomm::cuda {
namespace {

std::vector<Kernel*>& kernels() {
  static auto* all = new std::vector<Kernel*>;
  return *all;
}

const Driver& driver() {
  static const std::shared_ptr<const Driver> opened = Driver::open(kDriverLibrary);
  return *opened;
}

void check(cudaError_t status, const char* what, const char* hint = "") {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::kDevice, std::string(what) + cudaGetErrorString(status) + hint);
}

}  // namespace

bool enterKernel(Kernel& kernel) {
  kernels().push_back(&kernel);
  return true;
}

void loadKernels() {
  for (Kernel* kernel : kernels()) {
    cudaFuncAttributes unused{};
    check(cudaFuncGetAttributes(&unused, kernel->entry), "a CUDA kernel cannot be loaded: ",
          "; this build has code for other GPUs: build it on this machine, or with its compute "
          "capability in CMAKE_CUDA_ARCHITECTURES");
#if CUDART_VERSION >= 12010
    cudaKernel_t handle = nullptr;  // of all contexts
    check(cudaGetKernel(&handle, kernel->entry), "a CUDA kernel has no handle: ");
    kernel->handle.store(handle, std::memory_order_release);
#endif
  }
}

// By the driver, without the runtime's share of a launch: a message of 8 B between two processes of
// an H200 took 9.8 us so, and 13.6 through the runtime (2026-11-27).
void launch(const char* name, const Kernel& kernel, Grid blocks, int threads, void* stream,
            void** arguments) {
  constexpr Result kInvalidContext =
      201;  // this thread has used no device: the runtime gives it one
  if (void* handle = kernel.handle.load(std::memory_order_acquire)) {
    const Result result = driver().cuLaunchKernel(
        static_cast<Function>(handle), blocks.x, blocks.y, blocks.z, static_cast<unsigned>(threads),
        1, 1, 0, static_cast<DriverStream>(stream), arguments, nullptr);
    if (result == kSuccess) return;
    if (result != kInvalidContext) {
      throw Error(ErrorKind::kDevice,
                  std::string("launch of ") + name + " failed: " + driver().describe(result));
    }
  }
  const dim3 grid(blocks.x, blocks.y, blocks.z);
  const cudaError_t status =
      cudaLaunchKernel(kernel.entry, grid, dim3(static_cast<unsigned>(threads)), arguments, 0,
                       static_cast<cudaStream_t>(stream));
  if (status != cudaSuccess)
    check(status, ("launch of " + std::string(name) + " failed: ").c_str());
}

}  // namespace hdpcomm::cuda
