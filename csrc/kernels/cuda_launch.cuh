// Shared by the CUDA launchers of this room.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "device/cuda/loading.hpp"

namespace hdpcomm::kernels {

inline constexpr int kThreads = 256;

// Most blocks of a grid; kernels loop over the rest of the work.
inline constexpr int64_t kMaxBlocks = 1 << 16;

// Blocks of `threads` for `items` threads' worth of work.
inline unsigned blocksFor(int64_t items, int threads = kThreads) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + threads - 1) / threads, 1, kMaxBlocks));
}

// A kernel that cuda::loadKernels() loads.
template <auto kernel>
struct Loaded {
  static inline hdpcomm::cuda::Kernel it{reinterpret_cast<const void*>(kernel)};
  static inline const bool entered = hdpcomm::cuda::enterKernel(it);
};

// Enqueues `kernel` on `stream` (a cudaStream_t); throws DeviceError with `name` if that fails.
template <auto kernel, typename... Arguments>
void launchKernel(const char* name, dim3 blocks, int threads, void* stream,
                  Arguments... arguments) {
  static_cast<void>(&Loaded<kernel>::entered);  // its use makes it
  const hdpcomm::cuda::Grid grid{blocks.x, blocks.y, blocks.z};
  void* pointers[] = {&arguments..., nullptr};
  hdpcomm::cuda::launch(name, Loaded<kernel>::it, grid, threads, stream, pointers);
}

// The widest access, in bytes, that every address and size here allows (16, 8, 4, 2 or 1).
template <typename... Values>
int64_t commonWidth(Values... values) {
  const uint64_t all = (static_cast<uint64_t>(values) | ... | uint64_t{16});
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace hdpcomm::kernels
