// Enough of CUDA to run this library's kernels on the CPU: what the .cu files name, and a block of
// threads as fibers of one thread that the barriers and shuffles switch between, in a seeded order.
// A barrier that not all threads of a block (of a warp) reach ends the program with a message.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "../cuda_types.hpp"

namespace emulated {

inline dim3 thread, block, grid;
inline std::mt19937 order{1};  // of the threads of a block

enum class At { kRunning, kWarpBarrier, kBlockBarrier, kEnd };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  At at = At::kRunning;
};

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 16;
inline std::vector<Fiber> fibers(1024);
inline ucontext_t scheduler;
inline unsigned current = 0;
inline std::function<void()> body;
inline unsigned exchange[1024];  // of shuffles

inline void wait(At barrier) {
  Fiber& fiber = fibers[current];
  fiber.at = barrier;
  swapcontext(&fiber.context, &scheduler);
}

inline void enter() {
  body();
  fibers[current].at = At::kEnd;
}

inline void start(unsigned index) {
  Fiber& fiber = fibers[index];
  if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = &scheduler;
  fiber.at = At::kRunning;
  makecontext(&fiber.context, enter, 0);
}

// Lets the threads of [begin, end) go on if all that have not ended are at `barrier`.
inline bool release(unsigned begin, unsigned end, At barrier) {
  bool any = false;
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].at != barrier && fibers[i].at != At::kEnd) return false;
    any = any || fibers[i].at == barrier;
  }
  for (unsigned i = begin; any && i < end; ++i) {
    if (fibers[i].at == barrier) fibers[i].at = At::kRunning;
  }
  return any;
}

inline void runBlock(unsigned threads) {
  std::vector<unsigned> turn(threads);
  for (unsigned i = 0; i < threads; ++i) turn[i] = i, start(i);
  std::shuffle(turn.begin(), turn.end(), order);
  for (bool going = true; going;) {
    for (const unsigned i : turn) {
      if (fibers[i].at != At::kRunning) continue;
      current = i;
      thread = dim3(i, 0, 0);
      swapcontext(&scheduler, &fibers[i].context);
    }
    going = release(0, threads, At::kBlockBarrier);
    for (unsigned i = 0; i < threads; i += kWarp) {
      going = release(i, std::min(threads, i + kWarp), At::kWarpBarrier) || going;
    }
  }
  for (unsigned i = 0; i < threads; ++i) {
    if (fibers[i].at == At::kEnd) continue;
    std::fprintf(stderr, "thread %u waits at a barrier that others do not reach\n", i);
    std::exit(3);
  }
}

inline void run(dim3 blocks, unsigned threads, std::function<void()> kernel) {
  body = std::move(kernel);
  grid = blocks;
  for (unsigned y = 0; y < blocks.y; ++y) {
    for (unsigned x = 0; x < blocks.x; ++x) {
      block = dim3(x, y, 0);
      runBlock(threads);
    }
  }
}

}  // namespace emulated

#define threadIdx (::emulated::thread)
#define blockIdx (::emulated::block)
#define gridDim (::emulated::grid)

inline void __syncthreads() { emulated::wait(emulated::At::kBlockBarrier); }
inline void __syncwarp() { emulated::wait(emulated::At::kWarpBarrier); }

inline void __nanosleep(unsigned) {}

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  const unsigned self = threadIdx.x;
  std::memcpy(&emulated::exchange[self], &value, sizeof value);
  __syncwarp();
  float other;
  std::memcpy(&other, &emulated::exchange[self ^ static_cast<unsigned>(distance)], sizeof other);
  __syncwarp();
  return other;
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

template <typename Word>
Word __ldca(const Word* address) {
  return *address;
}
template <typename Word>
void __stwb(Word* address, Word value) {
  *address = value;
}
