// Kernels that write and await flags, for drivers without stream memory operations.
#include <cuda_runtime.h>

#include <cuda/atomic>

#include "device/cuda/driver.hpp"
#include "device/cuda/loading.hpp"

namespace hdpcomm::cuda {
namespace {

using Flag = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;

// Release at system scope: earlier kernels and copies of the stream are done, and the fence makes
// them visible to other devices and to the host before the value.
__global__ void writeValue(uint32_t* flag, uint32_t value) {
  __threadfence_system();
  Flag(*flag).store(value, ::cuda::std::memory_order_release);
}

// Acquire at system scope: pairs with the release of whoever writes.
__global__ void waitValue(uint32_t* flag, uint32_t value) {
  unsigned pause_ns = 32;
  while (static_cast<int32_t>(Flag(*flag).load(::cuda::std::memory_order_acquire) - value) < 0) {
    __nanosleep(pause_ns);
    if (pause_ns < 1024) pause_ns *= 2;
  }
}

// Entered like the kernels of kernels/.
Kernel writing{reinterpret_cast<const void*>(&writeValue)};
Kernel waiting{reinterpret_cast<const void*>(&waitValue)};
[[maybe_unused]] const bool entered = enterKernel(writing) && enterKernel(waiting);

}  // namespace

void launchWriteValue(uint32_t* flag, uint32_t value, void* stream) {
  void* arguments[] = {&flag, &value};
  launch("writeValue", writing, {}, 1, stream, arguments);
}

void launchWaitValue(const uint32_t* flag, uint32_t value, void* stream) {
  void* arguments[] = {&flag, &value};
  launch("waitValue", waiting, {}, 1, stream, arguments);
}

}  // namespace hdpcomm::cuda
