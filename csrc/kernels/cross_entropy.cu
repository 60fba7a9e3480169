#include "kernels/cross_entropy.hpp"
#include "kernels/reduce.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/softmax_elem.hpp"
#include "kernels/vector.cuh"

namespace hdpcomm::kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kRowThreads = 512;        // threads of a block that handles one row
constexpr int64_t kWarpColumns = 2048;  // longest row that a single warp handles

template <typename T>
__device__ __forceinline__ void addValue(OnlineSum& row, T value) {
  row = joinSums(row, {widen(value), 1.0f});
}

// Adds kGroup vectors, `step` vectors apart, with one new maximum and one rescaling for all.
template <typename T, int kGroup>
__device__ __forceinline__ void addVectors(OnlineSum& row, const T* vectors, int64_t first,
                                           int step) {
  constexpr int kCount = Pack<T>::kCount;
  Pack<T> parts[kGroup];
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    parts[j] = Pack<T>::load(vectors + (first + j * step) * kCount);
  }
  float max = row.max;
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) max = larger(max, widen(parts[j].values[i]));
  }
  const float offset = offsetOf(max);
  float sum = row.sum * expNegative(row.max - offset);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) part += expNegative(widen(parts[j].values[i]) - offset);
    sum += part;
  }
  row = {max, sum};
}

// The partial sum of thread `lane` of the `threads` that share a row.
template <typename T>
__device__ OnlineSum sumOfLane(const T* row, int64_t columns, int lane, int threads) {
  const Slices slices = sliceBuffer(row, columns, sizeof(T), false);
  const T* vectors = row + slices.head;
  constexpr int kGroup = 16 / Pack<T>::kCount;  // 16 values share a maximum and stay in registers
  OnlineSum result = emptySum();
  int64_t v = lane;
  for (; v + (kGroup - 1) * threads < slices.vectors; v += int64_t{kGroup} * threads) {
    addVectors<T, kGroup>(result, vectors, v, threads);
  }
  for (; v < slices.vectors; v += threads) addVectors<T, 1>(result, vectors, v, threads);
  for (int64_t e = lane; e < slices.edges(); e += threads) {
    addValue(result, row[slices.template edge<Pack<T>::kCount>(e)]);
  }
  return result;
}

__device__ __forceinline__ OnlineSum joinWarp(OnlineSum value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const OnlineSum other = {__shfl_xor_sync(~0u, value.max, distance),
                             __shfl_xor_sync(~0u, value.sum, distance)};
    value = joinSums(value, other);
  }
  return value;
}

template <typename T>
__device__ __forceinline__ void writeStats(const CrossEntropyStatsArgs& args, int64_t token,
                                           const T* row, LabelKind kind, OnlineSum sum) {
  const CrossEntropyShape& shape = args.shape;
  float logit = 0.0f;
  if (kind == LabelKind::kHere) logit = widen(row[args.labels[token] - shape.first_column]);
  if (kind == LabelKind::kInvalid) logit = NAN;
  args.stats[token] = sum.max;
  args.stats[shape.tokens + token] = sum.sum;
  args.stats[2 * shape.tokens + token] = logit;
}

// kThreadsPerRow is kWarp (several rows per block) or kRowThreads (one row per block).
template <typename T, int kThreadsPerRow>
__global__ void __launch_bounds__(kRowThreads, 2)
    statsKernel(const __grid_constant__ CrossEntropyStatsArgs args) {
  constexpr int kRows = kRowThreads / kThreadsPerRow;
  constexpr int kWarps = kThreadsPerRow / kWarp;
  __shared__ OnlineSum of_warps[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int64_t step = int64_t{gridDim.x} * kRows;
  for (int64_t token = int64_t{blockIdx.x} * kRows + threadIdx.x / kThreadsPerRow;
       token < args.shape.tokens; token += step) {
    const T* row = static_cast<const T*>(args.logits) + token * args.shape.stride;
    const LabelKind kind = kindOf(args.shape, args.labels[token]);
    if (kind == LabelKind::kIgnored) {  // the same for all threads of the row
      if (lane < 3) args.stats[lane * args.shape.tokens + token] = 0.0f;
      continue;
    }
    OnlineSum sum = joinWarp(sumOfLane(row, args.shape.columns, lane, kThreadsPerRow));
    if constexpr (kWarps > 1) {
      if (lane % kWarp == 0) of_warps[lane / kWarp] = sum;
      __syncthreads();
      if (lane < kWarp) sum = joinWarp(lane < kWarps ? of_warps[lane] : emptySum());
      __syncthreads();  // of_warps is written again for the next row
    }
    if (lane == 0) writeStats(args, token, row, kind, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    lossKernel(const __grid_constant__ CrossEntropyLossArgs args) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.tokens; i += step) {
    writeLoss(args, i);
  }
}

// The gradient of one row; `label` is its column in this shard, or outside.
template <typename T>
struct RowGradient {
  TokenScale token;
  int64_t label;
  bool ignored;

  __device__ __forceinline__ T operator()(T logit, bool is_label) const {
    T grad{};
    if (!ignored) narrow(softmaxGradient(widen(logit), token, is_label), grad);
    return grad;
  }
};

// logits and grad may be the same: a thread reads an element before it writes it, and no other
// thread touches it. They share their alignment modulo 16 (checked by the launcher).
template <typename T, int kThreadsPerRow, bool kVector>
__global__ void __launch_bounds__(kRowThreads, 2)
    gradKernel(const __grid_constant__ CrossEntropyGradArgs args) {
  constexpr int kRows = kRowThreads / kThreadsPerRow;
  constexpr int kCount = Pack<T>::kCount;
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int64_t step = int64_t{gridDim.x} * kRows;
  for (int64_t token = int64_t{blockIdx.x} * kRows + threadIdx.x / kThreadsPerRow;
       token < args.shape.tokens; token += step) {
    const T* row = static_cast<const T*>(args.logits) + token * args.shape.stride;
    T* grad = static_cast<T*>(args.grad) + token * args.shape.stride;
    const float weight = args.weights == nullptr ? 1.0f : args.weights[token];
    const OnlineSum sum{args.sums[token], args.sums[args.shape.tokens + token]};
    const RowGradient<T> gradient{
        scaleOf(sum, args.upstream[token * args.upstream_stride] * weight),
        args.labels[token] - args.shape.first_column,
        args.labels[token] == args.shape.ignore_index};
    Slices slices{0, 0, args.shape.columns};
    if constexpr (kVector) slices = sliceBuffer(grad, args.shape.columns, sizeof(T), false);
    const T* from = row + slices.head;
    T* to = grad + slices.head;
    const auto one = [&](Pack<T> part, int64_t v) {
      const int64_t ahead = gradient.label - slices.head - v * kCount;
      const int labelled = ahead >= 0 && ahead < kCount ? static_cast<int>(ahead) : -1;
#pragma unroll
      for (int i = 0; i < kCount; ++i) part.values[i] = gradient(part.values[i], i == labelled);
      part.store(to + v * kCount);
    };
    int64_t v = lane;
    for (; v + (kUnroll - 1) * kThreadsPerRow < slices.vectors; v += kUnroll * kThreadsPerRow) {
      Pack<T> parts[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        parts[j] = Pack<T>::load(from + (v + j * kThreadsPerRow) * kCount);
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) one(parts[j], v + j * kThreadsPerRow);
    }
    for (; v < slices.vectors; v += kThreadsPerRow) one(Pack<T>::load(from + v * kCount), v);
    for (int64_t e = lane; e < slices.edges(); e += kThreadsPerRow) {
      const int64_t i = slices.template edge<kCount>(e);
      grad[i] = gradient(row[i], i == gradient.label);
    }
  }
}

// Calls `function(T{}, std::integral_constant<int, threads per row>)`.
template <typename Function>
void withShape(const CrossEntropyShape& shape, Function&& function) {
  withFloat(shape.dtype, [&](auto value) {
    if (shape.columns <= kWarpColumns) {
      return function(value, std::integral_constant<int, kWarp>{});
    }
    return function(value, std::integral_constant<int, kRowThreads>{});
  });
}

}  // namespace

void crossEntropyStatsCuda(const CrossEntropyStatsArgs& args, void* stream) {
  checkCrossEntropy(args.shape, args.logits);
  if (args.shape.tokens == 0) return;
  withShape(args.shape, [&](auto value, auto threads) {
    constexpr int kPerRow = decltype(threads)::value;
    launchKernel<statsKernel<decltype(value), kPerRow>>(
        "cross_entropy_stats", blocksFor(args.shape.tokens * kPerRow, kRowThreads), kRowThreads,
        stream, args);
  });
}

void crossEntropyLossCuda(const CrossEntropyLossArgs& args, void* stream) {
  checkCrossEntropyLoss(args);
  if (args.tokens == 0) return;
  launchKernel<lossKernel>("cross_entropy_loss", blocksFor(args.tokens), kThreads, stream, args);
}

void crossEntropyGradCuda(const CrossEntropyGradArgs& args, void* stream) {
  checkCrossEntropy(args.shape, args.logits);
  checkElementAddress("cross-entropy", args.grad, args.shape.dtype);
  if (args.shape.tokens == 0 || args.shape.columns == 0) return;
  withShape(args.shape, [&](auto value, auto threads) {
    using T = decltype(value);
    constexpr int kPerRow = decltype(threads)::value;
    const unsigned blocks = blocksFor(args.shape.tokens * kPerRow, kRowThreads);
    const auto launch = [&]<bool kVector>(std::bool_constant<kVector>) {
      launchKernel<gradKernel<T, kPerRow, kVector>>("cross_entropy_grad", blocks, kRowThreads,
                                                    stream, args);
    };
    shiftedBy(args.logits, args.grad) ? launch(std::false_type{}) : launch(std::true_type{});
  });
}

}  // namespace hdpcomm::kernels
