#include <algorithm>
#include <cuda/atomic>

#include "kernels/reduce_types.hpp"
#include "kernels/relay.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

using Flag = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_system>;

// Arguments of a kernel go to the device with its launch, so few items have a structure of their
// own.
template <int kMost>
struct Items {
  RelayItem of[kMost];
};

template <int kMost>
struct PushFold {
  RelayItem pushes[kMost];
  const void* inputs[kMost];
  uint32_t* waits[kMost];
  uint32_t* sets[kMost];
  int num_pushes;
  int num_inputs;
  void* out;
  int64_t count;
  bool mean;
};

constexpr int kFewItems = 4;
constexpr int kFewPeers = 8;

constexpr unsigned kEager = 4096;  // looks at a flag before the thread sleeps between them
constexpr unsigned kPauseNs = 64;

// Acquire at system scope: what the peer did before it set the flag is seen by this thread, and by
// those that meet it at a barrier afterwards. The reset need not be ordered before anything but
// this thread's next release, by which the peer learns that it may set the flag again.
__device__ void take(uint32_t* address) {
  if (address == nullptr) return;
  const Flag flag(*address);
  for (unsigned looks = 0; flag.load(::cuda::std::memory_order_acquire) != 1; ++looks) {
    if (looks >= kEager) __nanosleep(kPauseNs);
  }
  flag.store(0, ::cuda::std::memory_order_relaxed);
}

// The barrier before it orders the stores of the other threads before this release, which is
// cumulative over them (PTX memory model, causality order).
__device__ void give(uint32_t* address) {
  if (address != nullptr) Flag(*address).store(1, ::cuda::std::memory_order_release);
}

// By `threads` threads, of which this is the one with the number `thread`.
__device__ __forceinline__ void copyBytes(void* dst, const void* src, int64_t bytes,
                                          unsigned thread, unsigned threads) {
  const auto* from = static_cast<const uint8_t*>(src);
  auto* to = static_cast<uint8_t*>(dst);
  const Slices slices = sliceBuffer(to, bytes, 1, shiftedBy(to, from));
  for (int64_t v = thread; v < slices.vectors; v += threads) {
    __stwb(reinterpret_cast<uint4*>(to + slices.head) + v,
           loadAnywhere(from + slices.head + v * 16));
  }
  for (int64_t e = thread; e < slices.edges(); e += threads) {
    const int64_t i = slices.edge<16>(e);
    __stwb(to + i, __ldca(from + i));
  }
}

template <typename T>
__device__ __forceinline__ Wide<T> load(const T* address) {
  return widen(Pack<T, 1>::load(address).values[0]);
}

template <typename T, RedOp op>
__device__ __forceinline__ void combineItem(const RelayItem& item) {
  const auto* a = static_cast<const T*>(item.operand);
  const auto* b = static_cast<const T*>(item.src);
  auto* out = static_cast<T*>(item.dst);
  const int64_t count = item.bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    narrow(combine<op, Wide<T>>(load(a + i), load(b + i)), out[i]);
  }
}

template <typename T, RedOp op, typename Args>
__global__ void __launch_bounds__(kThreads) relayKernel(const __grid_constant__ Args args) {
  const RelayItem& item = args.of[blockIdx.x];
  if (threadIdx.x == 0) take(item.wait);
  __syncthreads();  // taken
  if (item.operand == nullptr) {
    copyBytes(item.dst, item.src, item.bytes, threadIdx.x, kThreads);
  } else {
    combineItem<T, op>(item);
  }
  __syncthreads();  // copied
  if (threadIdx.x == 0) give(item.set);
}

// A warp for each push, and all threads for the fold.
template <typename T, RedOp op, typename Args>
__global__ void __launch_bounds__(kThreads) pushFoldKernel(const __grid_constant__ Args args) {
  constexpr unsigned kWarp = 32;
  const unsigned lane = threadIdx.x % kWarp;
  for (int p = static_cast<int>(threadIdx.x / kWarp); p < args.num_pushes;
       p += static_cast<int>(kThreads / kWarp)) {
    const RelayItem& item = args.pushes[p];
    if (lane == 0) take(item.wait);
    __syncwarp();  // taken
    copyBytes(item.dst, item.src, item.bytes, lane, kWarp);
    __syncwarp();  // pushed
    if (lane == 0) give(item.set);
  }
  for (int p = static_cast<int>(threadIdx.x); p < args.num_inputs; p += kThreads) {
    take(args.waits[p]);
  }
  __syncthreads();  // all pushes are done, which may read what is written now; all inputs are there
  for (int64_t i = threadIdx.x; i < args.count; i += kThreads) {
    Wide<T> acc = load(static_cast<const T*>(args.inputs[0]) + i);
    for (int p = 1; p < args.num_inputs; ++p) {
      acc = combine<op, Wide<T>>(acc, load(static_cast<const T*>(args.inputs[p]) + i));
    }
    if constexpr (std::is_floating_point_v<Wide<T>>) {
      if (args.mean) acc = acc / static_cast<Wide<T>>(args.num_inputs);
    }
    narrow(acc, static_cast<T*>(args.out)[i]);
  }
  __syncthreads();  // folded
  for (int p = static_cast<int>(threadIdx.x); p < args.num_inputs; p += kThreads) {
    give(args.sets[p]);
  }
}

template <int kMost>
void launchRelay(const RelayArgs& args, void* stream) {
  Items<kMost> items;
  std::copy_n(args.items, args.num_items, items.of);
  const auto blocks = static_cast<unsigned>(args.num_items);
  if (args.op == RedOp::kNone) {
    return launchKernel<relayKernel<uint8_t, RedOp::kMax, Items<kMost>>>("relay", blocks, kThreads,
                                                                         stream, items);
  }
  withReduction(args.dtype, args.op, [&](auto value, auto tag) {
    launchKernel<relayKernel<decltype(value), decltype(tag)::kOp, Items<kMost>>>(
        "relay", blocks, kThreads, stream, items);
  });
}

template <int kMost>
void launchPushFold(const PushFoldArgs& args, void* stream) {
  PushFold<kMost> few;
  std::copy_n(args.pushes, args.num_pushes, few.pushes);
  std::copy_n(args.inputs, args.num_inputs, few.inputs);
  std::copy_n(args.waits, args.num_inputs, few.waits);
  std::copy_n(args.sets, args.num_inputs, few.sets);
  few.num_pushes = args.num_pushes;
  few.num_inputs = args.num_inputs;
  few.out = args.out;
  few.count = args.count;
  few.mean = args.op == RedOp::kAvg;
  withReduction(args.dtype, args.op, [&](auto value, auto tag) {
    launchKernel<pushFoldKernel<decltype(value), decltype(tag)::kOp, PushFold<kMost>>>(
        "push_fold", 1, kThreads, stream, few);
  });
}

}  // namespace

void relayCuda(const RelayArgs& args, void* stream) {
  checkRelay(args);
  if (args.num_items == 0) return;
  return args.num_items <= kFewItems ? launchRelay<kFewItems>(args, stream)
                                     : launchRelay<kMaxItems>(args, stream);
}

void pushFoldCuda(const PushFoldArgs& args, void* stream) {
  checkPushFold(args);
  const int most = std::max(args.num_pushes, args.num_inputs);
  return most <= kFewPeers ? launchPushFold<kFewPeers>(args, stream)
                           : launchPushFold<kMaxPeers>(args, stream);
}

}  // namespace hdpcomm::kernels
