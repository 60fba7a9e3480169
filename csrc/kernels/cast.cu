#include "kernels/cast.hpp"
#include "kernels/cast_types.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

// kCount elements at a time: 16 bytes of the wider type, as many elements of the narrower one; or 1
// if the two buffers are not aligned to each other.
template <typename To, typename From, int kCount>
__global__ void __launch_bounds__(kThreads) castKernel(To* out, const From* in, Slices slices) {
  To* to = out + slices.head;
  const From* from = in + slices.head;
  forVectors(slices.vectors, [&](auto group, int64_t first) {
    constexpr int kGroup = decltype(group)::value;
    Pack<From, kCount> parts[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      parts[j] = Pack<From, kCount>::load(from + (first + j * kThreads) * kCount);
    }
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      Pack<To, kCount> result;
#pragma unroll
      for (int i = 0; i < kCount; ++i) convertElement(parts[j].values[i], result.values[i]);
      result.store(to + (first + j * kThreads) * kCount);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x < slices.edges()) {
    const int64_t i = slices.edge<kCount>(threadIdx.x);
    convertElement(in[i], out[i]);
  }
}

template <typename To, typename From>
void launch(const CastArgs& args, void* stream) {
  constexpr int kWidest = static_cast<int>(sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  constexpr int kCount = 16 / kWidest;
  auto* out = static_cast<To*>(args.out);
  const auto* in = static_cast<const From*>(args.in);
  Slices slices = sizeof(To) == kWidest ? sliceBuffer(out, args.count, kWidest, false)
                                        : sliceBuffer(in, args.count, kWidest, false);
  const bool together = commonWidth(reinterpret_cast<uintptr_t>(out + slices.head)) >=
                            kCount * static_cast<int64_t>(sizeof(To)) &&
                        commonWidth(reinterpret_cast<uintptr_t>(in + slices.head)) >=
                            kCount * static_cast<int64_t>(sizeof(From));
  if (together) {
    launchKernel<castKernel<To, From, kCount>>("cast", blocksForVectors(slices.vectors), kThreads,
                                               stream, out, in, slices);
  } else {
    slices = Slices{0, args.count, 0};
    launchKernel<castKernel<To, From, 1>>("cast", blocksForVectors(slices.vectors), kThreads,
                                          stream, out, in, slices);
  }
}

}  // namespace

void castCuda(const CastArgs& args, void* stream) {
  checkCast(args);
  if (args.count == 0 || (args.to == args.from && args.out == args.in)) return;
  if (args.to == args.from) {
    const size_t bytes = static_cast<size_t>(args.count) * dtypeBytes(args.to);
    const cudaError_t status = cudaMemcpyAsync(args.out, args.in, bytes, cudaMemcpyDeviceToDevice,
                                               static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) {
      throw Error(ErrorKind::kDevice,
                  std::string("copy of a cast failed: ") + cudaGetErrorString(status));
    }
    return;
  }
  withCastType(args.to, [&](auto to) {
    withCastType(args.from, [&](auto from) {
      using To = decltype(to);
      using From = decltype(from);
      if constexpr (!std::is_same_v<To, From>) launch<To, From>(args, stream);
    });
  });
}

}  // namespace hdpcomm::kernels
