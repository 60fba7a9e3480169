// What the CUDA launchers of this room share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "hdpcomm/base/error.hpp"

namespace hdpcomm::kernels {

inline constexpr int kThreads = 256;

// Blocks for `items` threads' worth of work; kernels stride over the rest.
inline unsigned blocksFor(int64_t items) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  return static_cast<unsigned>(
      std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

inline void checkLaunch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw Error(ErrorKind::kDevice,
                std::string("launch of ") + kernel + " failed: " + cudaGetErrorString(status));
  }
}

// The widest access, in bytes, that every address and size here allows (16, 8, 4, 2 or 1).
template <typename... Values>
int64_t commonWidth(Values... values) {
  const uint64_t all = (static_cast<uint64_t>(values) | ... | uint64_t{16});
  return static_cast<int64_t>(all & (~all + 1));
}

}  // namespace hdpcomm::kernels
