// The CUDA kernels of this library: loaded ahead of their first launch, and launched.
//
// CUDA loads a kernel when it is first launched, and a load may wait for all work of the context
// (CUDA C++ Programming Guide, "Lazy Loading"). A launch that follows a wait for a flag then waits
// for the flag, and with it the host, which was to enqueue what sets the flag: seen on an H100 with
// a message from a rank to itself. Kernels that were loaded before never wait.
#pragma once

#include <atomic>

namespace hdpcomm::cuda {

struct Kernel {
  const void* entry;                    // the function that the runtime knows it by
  std::atomic<void*> handle = nullptr;  // the driver's, once it is loaded
};

// Loads all kernels into the current context, those of one architecture; some 10 ms. Throws
// DeviceError.
void loadKernels();

// Enters a kernel for loadKernels(), before main(). Returns true.
bool enterKernel(Kernel& kernel);

struct Grid {
  unsigned x = 1, y = 1, z = 1;
};

// Enqueues a kernel on a stream (a cudaStream_t). `arguments` point to those of the kernel. Throws
// DeviceError with `name`.
void launch(const char* name, const Kernel& kernel, Grid blocks, int threads, void* stream,
            void** arguments);

}  // namespace hdpcomm::cuda
