// 16-byte memory accesses at any alignment.
#pragma once

#include <cstdint>

#include "kernels/cuda_launch.cuh"

namespace hdpcomm::kernels {

// The type by which kBytes are loaded and stored at once.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = unsigned char;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// kCount elements that are loaded and stored as one word; 16 bytes by default.
template <typename T, int kElements = 16 / static_cast<int>(sizeof(T))>
union Pack {
  static constexpr int kCount = kElements;
  using Word = typename WordOf<static_cast<int>(sizeof(T)) * kCount>::Type;
  Word bits;
  T values[kCount];

  // From and to global memory in one instruction: left to itself, the compiler splits accesses of
  // 16-bit elements.
  __device__ __forceinline__ static Pack load(const void* address) {
    Pack pack;
    pack.bits = __ldca(static_cast<const Word*>(address));
    return pack;
  }
  __device__ __forceinline__ void store(void* address) const {
    __stwb(static_cast<Word*>(address), bits);
  }
};

// 16 bytes from an address that need not be a multiple of 16. Reads the one or two aligned words
// that hold them, so up to 15 bytes more on either side; callers stay away from the ends of an
// allocation (Slices). The shift is the same for all threads of a loop, so they do not diverge.
__device__ __forceinline__ uint4 loadAnywhere(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const unsigned shift = static_cast<unsigned>(at) & 15u;
  const auto* words = reinterpret_cast<const uint4*>(at - shift);
  const uint4 low = __ldca(words);
  if (shift == 0) return low;
  const uint4 high = __ldca(words + 1);
  uint32_t w0 = low.x, w1 = low.y, w2 = low.z, w3 = low.w;
  uint32_t w4 = high.x, w5 = high.y, w6 = high.z;
  const uint32_t w7 = high.w;
  if (shift & 8u) {
    w0 = w2, w1 = w3, w2 = w4, w3 = w5, w4 = w6, w5 = w7;
  }
  if (shift & 4u) {
    w0 = w1, w1 = w2, w2 = w3, w3 = w4, w4 = w5;
  }
  const unsigned bits = 8u * (shift & 3u);
  return make_uint4(__funnelshift_r(w0, w1, bits), __funnelshift_r(w1, w2, bits),
                    __funnelshift_r(w2, w3, bits), __funnelshift_r(w3, w4, bits));
}

// How a buffer of `count` elements is cut: `head` elements up to the first multiple of 16 bytes of
// the destination, then whole vectors, then the rest. head + tail < 3 * 16 bytes, so one block
// handles them with one element per thread.
struct Slices {
  int64_t head = 0;
  int64_t vectors = 0;
  int64_t tail = 0;

  __host__ __device__ int64_t edges() const { return head + tail; }
  // The element of the i-th edge.
  template <int kCount>
  __device__ int64_t edge(int64_t i) const {
    return i < head ? i : i + vectors * kCount;
  }
};

// `shifted`: some source is not aligned like the destination. The last vector then goes to the
// tail, so that no word beyond the source's end is read.
__host__ __device__ inline Slices sliceBuffer(const void* destination, int64_t count,
                                              int element_bytes, bool shifted) {
  const int64_t in_vector = 16 / element_bytes;
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(destination) & 15u);
  const int64_t to_boundary = (16 - past) % 16 / element_bytes;
  Slices slices;
  slices.head = to_boundary < count ? to_boundary : count;
  slices.vectors = (count - slices.head) / in_vector;
  if (shifted && slices.vectors > 0) --slices.vectors;
  slices.tail = count - slices.head - slices.vectors * in_vector;
  return slices;
}

// Whether two addresses differ modulo 16.
__host__ __device__ inline bool shiftedBy(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) ^ reinterpret_cast<uintptr_t>(b)) & 15u) != 0;
}

// Vectors that a thread has in flight: 64 bytes of each source.
inline constexpr int kUnroll = 4;

// Blocks for `vectors`, kUnroll of them per thread; at least one, for the edges.
inline unsigned blocksForVectors(int64_t vectors) {
  return blocksFor((vectors + kUnroll - 1) / kUnroll);
}

// Calls `step(std::integral_constant<int, n>, first)` for groups of n vectors first, first +
// kThreads, ... until all `vectors` are done: n = kUnroll, and 1 for the last incomplete tile.
template <typename Step>
__device__ __forceinline__ void forVectors(int64_t vectors, Step&& step) {
  constexpr int64_t kTile = int64_t{kUnroll} * kThreads;
  const int64_t tiles = vectors / kTile;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    step(std::integral_constant<int, kUnroll>{}, tile * kTile + threadIdx.x);
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t v = tiles * kTile + int64_t{blockIdx.x} * kThreads + threadIdx.x; v < vectors;
       v += stride) {
    step(std::integral_constant<int, 1>{}, v);
  }
}

}  // namespace hdpcomm::kernels
