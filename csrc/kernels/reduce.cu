#include "kernels/reduce.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

// out may be a or b; it then has their alignment, so one thread alone reads and writes a vector.
template <typename T, RedOp op>
__global__ void __launch_bounds__(kThreads)
    reduceKernel(T* out, const T* a, const T* b, Slices slices) {
  constexpr int kCount = Pack<T>::kCount;
  T* to = out + slices.head;
  const T* from_a = a + slices.head;
  const T* from_b = b + slices.head;
  forVectors(slices.vectors, [&](auto group, int64_t first) {
    constexpr int kGroup = decltype(group)::value;
    Pack<T> left[kGroup];
    Pack<T> right[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      left[j].bits = loadAnywhere(from_a + (first + j * kThreads) * kCount);
      right[j].bits = loadAnywhere(from_b + (first + j * kThreads) * kCount);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        reduceElement<op>(left[j].values[i], right[j].values[i], left[j].values[i]);
      }
      left[j].store(to + (first + j * kThreads) * kCount);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x < slices.edges()) {
    const int64_t i = slices.edge<kCount>(threadIdx.x);
    reduceElement<op>(a[i], b[i], out[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) divideKernel(T* data, Wide<T> divisor, Slices slices) {
  constexpr int kCount = Pack<T>::kCount;
  T* body = data + slices.head;
  forVectors(slices.vectors, [&](auto group, int64_t first) {
    constexpr int kGroup = decltype(group)::value;
    Pack<T> parts[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      parts[j] = Pack<T>::load(body + (first + j * kThreads) * kCount);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        divideElement(parts[j].values[i], divisor, parts[j].values[i]);
      }
      parts[j].store(body + (first + j * kThreads) * kCount);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x < slices.edges()) {
    T& value = data[slices.edge<kCount>(threadIdx.x)];
    divideElement(value, divisor, value);
  }
}

template <typename T>
void launchDivide(const DivideArgs& args, void* stream) {
  const Slices slices = sliceBuffer(args.data, args.count, sizeof(T), false);
  launchKernel<divideKernel<T>>("divide", blocksForVectors(slices.vectors), kThreads, stream,
                                static_cast<T*>(args.data), static_cast<Wide<T>>(args.divisor),
                                slices);
}

}  // namespace

void reduceCuda(const ReduceArgs& args, void* stream) {
  checkReduce(args);
  if (args.count == 0) return;
  withReduction(args.dtype, args.op, [&](auto value, auto tag) {
    using T = decltype(value);
    const Slices slices = sliceBuffer(args.out, args.count, sizeof(T),
                                      shiftedBy(args.out, args.a) || shiftedBy(args.out, args.b));
    launchKernel<reduceKernel<T, decltype(tag)::kOp>>(
        "reduce", blocksForVectors(slices.vectors), kThreads, stream, static_cast<T*>(args.out),
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), slices);
  });
}

void divideCuda(const DivideArgs& args, void* stream) {
  checkDivide(args);
  if (args.count == 0) return;
  if (args.dtype == DType::kFloat64) return launchDivide<double>(args, stream);
  withFloat(args.dtype, [&](auto value) { launchDivide<decltype(value)>(args, stream); });
}

}  // namespace hdpcomm::kernels
