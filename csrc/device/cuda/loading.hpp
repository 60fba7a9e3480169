// Loading the CUDA kernels of this library ahead of their first launch.
//
// CUDA loads a kernel when it is first launched, and a load may wait for all work of the context
// (CUDA C++ Programming Guide, "Lazy Loading"). A launch that follows a wait for a flag then waits
// for the flag, and with it the host, which was to enqueue what sets the flag: seen on an H100 with
// a message from a rank to itself. Kernels that were loaded before never wait.
#pragma once

namespace hdpcomm::cuda {

// Loads all kernels into the current context, those of one architecture; some 10 ms. Throws
// DeviceError.
void loadKernels();

// Enters a kernel for loadKernels(), before main(). Returns true.
bool enterKernel(const void* kernel);

}  // namespace hdpcomm::cuda
