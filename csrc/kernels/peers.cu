#include <cuda/atomic>

#include "kernels/peers.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

// Number of inputs that have a vector in flight at a time.
constexpr int kPeerUnroll = 8;

template <typename T, RedOp op>
__device__ __forceinline__ T foldOne(const FoldArgs& args, int64_t i) {
  Wide<T> acc = widen(static_cast<const T*>(args.inputs[0])[i]);
  for (int p = 1; p < args.num_inputs; ++p) {
    acc = combine<op, Wide<T>>(acc, widen(static_cast<const T*>(args.inputs[p])[i]));
  }
  T out;
  if constexpr (std::is_floating_point_v<Wide<T>>) {
    if (args.op == RedOp::kAvg) acc = acc / static_cast<Wide<T>>(args.num_inputs);
  }
  narrow(acc, out);
  return out;
}

// One thread per vector. If an output is not aligned like the first one, there are no vectors and
// all elements are edges.
template <typename T, RedOp op>
__global__ void __launch_bounds__(kThreads)
    foldKernel(const __grid_constant__ FoldArgs args, Slices slices) {
  constexpr int kCount = Pack<T>::kCount;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t v = thread; v < slices.vectors; v += stride) {
    const int64_t at = slices.head + v * kCount;
    Wide<T> acc[kCount];
    for (int p = 0; p < args.num_inputs; p += kPeerUnroll) {
      Pack<T> parts[kPeerUnroll];
#pragma unroll
      for (int j = 0; j < kPeerUnroll; ++j) {
        if (p + j < args.num_inputs) {
          parts[j].bits = loadAnywhere(static_cast<const T*>(args.inputs[p + j]) + at);
        }
      }
#pragma unroll
      for (int j = 0; j < kPeerUnroll; ++j) {
        if (p + j >= args.num_inputs) break;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const Wide<T> value = widen(parts[j].values[i]);
          acc[i] = p + j == 0 ? value : combine<op, Wide<T>>(acc[i], value);
        }
      }
    }
    Pack<T> result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (std::is_floating_point_v<Wide<T>>) {
        if (args.op == RedOp::kAvg) acc[i] = acc[i] / static_cast<Wide<T>>(args.num_inputs);
      }
      narrow(acc[i], result.values[i]);
    }
    for (int p = 0; p < args.num_outputs; ++p) {
      result.store(static_cast<T*>(args.outputs[p]) + at);
    }
  }
  for (int64_t e = thread; e < slices.edges(); e += stride) {
    const int64_t i = slices.edge<kCount>(e);
    const T value = foldOne<T, op>(args, i);
    for (int p = 0; p < args.num_outputs; ++p) static_cast<T*>(args.outputs[p])[i] = value;
  }
}

template <typename T, RedOp op>
void launchFold(const FoldArgs& args, void* stream) {
  bool shifted = false;
  for (int p = 0; p < args.num_inputs; ++p) {
    shifted = shifted || shiftedBy(args.outputs[0], args.inputs[p]);
  }
  Slices slices = sliceBuffer(args.outputs[0], args.count, sizeof(T), shifted);
  for (int p = 1; p < args.num_outputs; ++p) {
    if (shiftedBy(args.outputs[0], args.outputs[p])) slices = Slices{0, 0, args.count};
  }
  const int64_t threads = slices.vectors > 0 ? slices.vectors : slices.edges();
  launchKernel<foldKernel<T, op>>("fold", blocksFor(threads), kThreads, stream, args, slices);
}

// blockIdx.y is the input, counted from `first`.
__global__ void __launch_bounds__(kThreads)
    collectKernel(const __grid_constant__ CollectArgs args) {
  const int p = (args.first + static_cast<int>(blockIdx.y)) % args.num_inputs;
  const auto* from = static_cast<const uint8_t*>(args.inputs[p]);
  auto* to = static_cast<uint8_t*>(args.out) + p * args.stride;
  if (from == to) return;
  const Slices slices = sliceBuffer(to, args.bytes, 1, shiftedBy(to, from));
  const uint8_t* body = from + slices.head;
  uint8_t* out = to + slices.head;
  forVectors(slices.vectors, [&](auto group, int64_t first) {
    constexpr int kGroup = decltype(group)::value;
    uint4 parts[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) parts[j] = loadAnywhere(body + (first + j * kThreads) * 16);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      __stwb(reinterpret_cast<uint4*>(out + (first + j * kThreads) * 16), parts[j]);
    }
  });
  if (blockIdx.x == 0 && threadIdx.x < slices.edges()) {
    const int64_t i = slices.edge<16>(threadIdx.x);
    to[i] = from[i];
  }
}

__global__ void __launch_bounds__(kThreads) putKernel(PutArgs args) {
  const auto* from = static_cast<const uint8_t*>(args.src);
  auto* to = static_cast<uint8_t*>(args.dst);
  const Slices slices = sliceBuffer(to, args.bytes, 1, shiftedBy(to, from));
  for (int64_t v = threadIdx.x; v < slices.vectors; v += kThreads) {
    __stwb(reinterpret_cast<uint4*>(to + slices.head) + v,
           loadAnywhere(from + slices.head + v * 16));
  }
  if (threadIdx.x < slices.edges()) {
    const int64_t i = slices.edge<16>(threadIdx.x);
    to[i] = from[i];
  }
  // The barrier orders the block's stores before the release of thread 0, which is cumulative over
  // them (PTX memory model, causality order) and of system scope: peers and the host see the bytes
  // when they see the flag.
  __syncthreads();
  if (threadIdx.x == 0) {
    ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>(*args.flag)
        .store(args.value, ::cuda::std::memory_order_release);
  }
}

}  // namespace

void foldCuda(const FoldArgs& args, void* stream) {
  checkFold(args);
  if (args.count == 0) return;
  withReduction(args.dtype, args.op, [&](auto value, auto tag) {
    launchFold<decltype(value), decltype(tag)::kOp>(args, stream);
  });
}

void collectCuda(const CollectArgs& args, void* stream) {
  checkCollect(args);
  if (args.bytes == 0) return;
  const dim3 grid(blocksForVectors(args.bytes / 16), static_cast<unsigned>(args.num_inputs));
  launchKernel<collectKernel>("collect", grid, kThreads, stream, args);
}

void putCuda(const PutArgs& args, void* stream) {
  checkPut(args);
  launchKernel<putKernel>("put", 1, kThreads, stream, args);
}

}  // namespace hdpcomm::kernels
