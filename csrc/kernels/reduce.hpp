// Element-wise reductions of two buffers, and division by a number.
//
// The CPU and the CUDA launchers share reduce_elem.hpp and give the same bits (NaN payloads apart).
// 16-bit floats are computed in fp32 and rounded once. Buffers may begin at any multiple of the
// size of an element, aligned with each other or not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/call.hpp"

namespace hdpcomm {

// out[i] = a[i] op b[i] on host memory. avg sums; divideFunction() divides at the end. On bool, sum
// and max are "or", prod and min are "and". Throws InvalidUsage for a combination that does not
// exist (avg of integers).
ReduceFn reduceFunction(DType dtype, RedOp op);

// data[i] = data[i] / divisor on host memory; floating types only.
using DivideFn = void (*)(void* data, size_t count, double divisor);
DivideFn divideFunction(DType dtype);

namespace kernels {

// out[i] = a[i] op b[i]; out may be a or b, and overlaps neither otherwise.
struct ReduceArgs {
  void* out = nullptr;
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  RedOp op = RedOp::kSum;
};

void reduceCpu(const ReduceArgs& args);
// Enqueues on `stream` (a cudaStream_t). Throws InvalidUsage or, when the launch fails,
// DeviceError.
void reduceCuda(const ReduceArgs& args, void* stream);

// data[i] = data[i] / divisor; floating types only.
struct DivideArgs {
  void* data = nullptr;
  int64_t count = 0;
  double divisor = 1.0;
  DType dtype = DType::kFloat32;
};

void divideCpu(const DivideArgs& args);
void divideCuda(const DivideArgs& args, void* stream);

// Shared by the launchers. Throw InvalidUsage for a combination that does not exist or a misaligned
// address.
void checkReduce(const ReduceArgs& args);
void checkDivide(const DivideArgs& args);
void checkCount(const char* kernel, int64_t count);
void checkElementAddress(const char* kernel, const void* address, DType dtype);

}  // namespace kernels
}  // namespace hdpcomm
