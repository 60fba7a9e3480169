#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "device/accumulate.hpp"

namespace hdpcomm {
namespace {

__global__ void accumulate(uint32_t* dst, const uint32_t* src, size_t count) {
  const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    dst[i] += src[i];
  }
}

}  // namespace

void detail::accumulateCuda(uint32_t* dst, const uint32_t* src, size_t count, void* stream) {
  if (count == 0) return;
  constexpr size_t kThreads = 256;
  const auto blocks =
      static_cast<unsigned>(std::min<size_t>((count + kThreads - 1) / kThreads, 1024));
  accumulate<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(dst, src, count);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) {
    throw Error(ErrorKind::kDevice,
                std::string("launch of accumulate failed: ") + cudaGetErrorString(status));
  }
}

}  // namespace hdpcomm
