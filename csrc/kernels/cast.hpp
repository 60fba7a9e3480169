// Conversion of a buffer from one element type to another.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"

namespace hdpcomm::kernels {

// out[i] = in[i], converted as convertElement() in reduce_elem.hpp says. Both types are float16,
// bfloat16, float32, float64, int32 or int64. The buffers do not overlap, unless they are the same
// and of the same type.
struct CastArgs {
  void* out = nullptr;
  const void* in = nullptr;
  int64_t count = 0;
  DType to = DType::kFloat32;
  DType from = DType::kFloat32;
};

void castCpu(const CastArgs& args);
// Enqueues on `stream` (a cudaStream_t). Throws InvalidUsage or, when the launch fails,
// DeviceError.
void castCuda(const CastArgs& args, void* stream);

void checkCast(const CastArgs& args);  // shared by both

}  // namespace hdpcomm::kernels
