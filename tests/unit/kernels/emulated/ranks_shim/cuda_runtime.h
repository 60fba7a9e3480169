// Kernels of several ranks at the same time, on one thread of the CPU, with a memory that is as weak
// as a GPU's may be. The threads of all blocks that run are fibers, and a seed draws which of them
// goes on at each of these points:
//
// - a store to memory (__stwb, or a relaxed store of a flag) waits in a buffer of its thread and
//   arrives at any later time, in any order; all that its thread's next release store must not
//   overtake arrives before that: the thread's own stores, and those of threads that met it at a
//   barrier of their block or warp after they had made them;
// - a load (__ldca) may give what a block has read of that place before, or what was fetched
//   beforehand of places that were ever read, until a thread of the block makes an acquire load;
// - a load of a flag lets all others go on.
//
// Nothing of the kernels may touch other memory of ranks in another way. If nobody can go on, the
// program ends with a message.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "../cuda_types.hpp"

namespace emulated {

inline std::mt19937 order{1};
inline uint64_t draw(uint64_t below) { return order() % below; }

struct Store {
  void* address;  // null: it has arrived
  size_t bytes;
  int rank;
  unsigned char value[16];
};
using StorePtr = std::shared_ptr<Store>;

enum class At { kRunning, kWarpBarrier, kBlockBarrier, kPolling, kEnd };

struct Block;
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  At at = At::kRunning;
  unsigned index = 0;
  Block* block = nullptr;
  std::vector<StorePtr> before;  // what its next release comes after, and has not arrived yet
};

// A block that runs; its kernel's blocks are all there at the same time.
struct Block {
  dim3 index, grid;
  std::function<void()> body;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::map<uintptr_t, uint4> cache;  // of aligned 16 bytes
  int rank = 0;
};

struct Launch {
  dim3 blocks;
  unsigned threads;
  std::function<void()> body;
};

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 14;

inline std::vector<std::deque<Launch>> streams;  // by rank
inline std::vector<std::vector<std::unique_ptr<Block>>> running;
inline std::vector<StorePtr> buffered;  // all stores that have not arrived
inline std::vector<uintptr_t> ever_read;
inline std::set<uintptr_t> known_read;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline ucontext_t scheduler;
inline Fiber* current = nullptr;
inline int calling = 0;  // the rank whose host launches

inline void yield(At at) {
  current->at = at;
  swapcontext(&current->context, &scheduler);
}

inline void arrive(const StorePtr& store) {
  if (store->address == nullptr) return;
  std::memcpy(store->address, store->value, store->bytes);
  store->address = nullptr;
}

inline void forget() {
  std::erase_if(buffered, [](const StorePtr& store) { return store->address == nullptr; });
}

// Stores to one place arrive in the order of one thread.
inline void write(void* address, const void* value, size_t bytes) {
  for (const StorePtr& earlier : current->before) {
    const auto* at = static_cast<char*>(earlier->address);
    if (at != nullptr && at < static_cast<char*>(address) + bytes &&
        static_cast<char*>(address) < at + earlier->bytes) {
      arrive(earlier);
    }
  }
  auto store = std::make_shared<Store>();
  store->address = address;
  store->bytes = bytes;
  store->rank = current->block->rank;
  std::memcpy(store->value, value, bytes);
  buffered.push_back(store);
  current->before.push_back(store);
}

inline void arriveBefore() {
  for (const StorePtr& store : current->before) arrive(store);
  current->before.clear();
  forget();
}

inline uint4 readWord(uintptr_t aligned) {
  auto& cache = current->block->cache;
  if (known_read.insert(aligned).second) ever_read.push_back(aligned);
  const auto found = cache.find(aligned);
  if (found != cache.end()) return found->second;
  uint4 word;
  std::memcpy(&word, reinterpret_cast<void*>(aligned), sizeof word);
  return cache[aligned] = word;
}

inline void read(const void* address, void* value, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t aligned = at / 16 * 16;
  const uint4 word = readWord(aligned);
  std::memcpy(value, reinterpret_cast<const char*>(&word) + (at - aligned), bytes);
  for (const StorePtr& own : current->before) {  // a thread sees its own stores
    const auto* to = static_cast<char*>(own->address);
    for (size_t i = 0; to != nullptr && i < bytes; ++i) {
      const auto* byte = static_cast<const char*>(address) + i;
      if (byte >= to && byte < to + own->bytes) {
        static_cast<char*>(value)[i] = static_cast<char>(own->value[byte - to]);
      }
    }
  }
}

inline void fetchBeforehand(Block& block) {
  if (ever_read.empty()) return;
  const uintptr_t aligned = ever_read[draw(ever_read.size())];
  uint4 word;
  std::memcpy(&word, reinterpret_cast<void*>(aligned), sizeof word);
  block.cache.emplace(aligned, word);
}

inline void enter() {
  current->block->body();
  current->at = At::kEnd;
}

inline void startLaunch(int rank) {
  const Launch& launch = streams[static_cast<size_t>(rank)].front();
  for (unsigned x = 0; x < launch.blocks.x; ++x) {
    auto block = std::make_unique<Block>();
    block->index = dim3(x, 0, 0);
    block->grid = launch.blocks;
    block->body = launch.body;
    block->rank = rank;
    for (unsigned i = 0; i < launch.threads; ++i) {
      auto fiber = std::make_unique<Fiber>();
      if (stacks.empty()) stacks.push_back(std::make_unique<char[]>(kStack));
      fiber->stack = std::move(stacks.back());
      stacks.pop_back();
      fiber->index = i;
      fiber->block = block.get();
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = &scheduler;
      makecontext(&fiber->context, enter, 0);
      block->fibers.push_back(std::move(fiber));
    }
    running[static_cast<size_t>(rank)].push_back(std::move(block));
  }
}

// Threads of [begin, end) that have all come to `barrier` go on, and share what they wrote before.
inline bool release(Block& block, unsigned begin, unsigned end, At barrier) {
  std::vector<Fiber*> met;
  for (unsigned i = begin; i < end; ++i) {
    Fiber& fiber = *block.fibers[i];
    if (fiber.at == At::kEnd) continue;
    if (fiber.at != barrier) return false;
    met.push_back(&fiber);
  }
  if (met.empty()) return false;
  std::vector<StorePtr> all;
  for (Fiber* fiber : met) all.insert(all.end(), fiber->before.begin(), fiber->before.end());
  std::erase_if(all, [](const StorePtr& store) { return store->address == nullptr; });
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  for (Fiber* fiber : met) fiber->before = all, fiber->at = At::kRunning;
  return true;
}

inline bool releaseAny(Block& block) {
  const auto threads = static_cast<unsigned>(block.fibers.size());
  bool any = release(block, 0, threads, At::kBlockBarrier);
  for (unsigned i = 0; i < threads; i += kWarp) {
    any = release(block, i, std::min(threads, i + kWarp), At::kWarpBarrier) || any;
  }
  return any;
}

inline void step(Block& block, Fiber& fiber) {
  static_cast<void>(block);
  current = &fiber;
  fiber.at = At::kRunning;
  swapcontext(&scheduler, &fiber.context);
  current = nullptr;
}

inline void endWith(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(3);
}

// Runs all that was launched. Between any two steps stores may arrive.
inline void runAll() {
  uint64_t idle = 0;
  for (;;) {
    std::vector<Block*> blocks;
    for (size_t rank = 0; rank < streams.size(); ++rank) {
      auto& here = running[rank];
      if (here.empty() && !streams[rank].empty()) startLaunch(static_cast<int>(rank));
      for (auto& block : here) blocks.push_back(block.get());
    }
    if (blocks.empty()) break;
    Block& block = *blocks[draw(blocks.size())];
    std::vector<Fiber*> ready;
    for (auto& fiber : block.fibers) {
      if (fiber->at == At::kRunning || fiber->at == At::kPolling) ready.push_back(fiber.get());
    }
    bool moved = false;
    if (!ready.empty()) {
      // One thread, or all in any order, so that blocks do not crawl.
      if (draw(4) == 0) std::swap(ready[0], ready[draw(ready.size())]), ready.resize(1);
      std::shuffle(ready.begin(), ready.end(), order);
      for (Fiber* fiber : ready) {
        const At before = fiber->at;
        step(block, *fiber);
        moved = moved || before != At::kPolling || fiber->at != At::kPolling;
      }
    }
    moved = releaseAny(block) || moved;
    if (draw(3) == 0) fetchBeforehand(block);
    for (uint64_t i = draw(4); i > 0 && !buffered.empty(); --i) {
      arrive(buffered[draw(buffered.size())]);
      forget();
      moved = true;
    }
    bool ended = true;
    auto& here = running[static_cast<size_t>(block.rank)];
    for (const auto& each : here) {
      for (const auto& fiber : each->fibers) ended = ended && fiber->at == At::kEnd;
    }
    if (ended) {
      // The end of a kernel: all that it wrote has arrived.
      for (const StorePtr& store : buffered) {
        if (store->rank == block.rank) arrive(store);
      }
      forget();
      const int rank = block.rank;
      for (auto& each : here) {
        for (auto& fiber : each->fibers) stacks.push_back(std::move(fiber->stack));
      }
      here.clear();
      streams[static_cast<size_t>(rank)].pop_front();
      moved = true;
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 20000) endWith("deadlock: all threads wait for flags that nobody sets");
  }
}

inline void run(dim3 blocks, unsigned threads, std::function<void()> body) {
  streams[static_cast<size_t>(calling)].push_back({blocks, threads, std::move(body)});
}

}  // namespace emulated

#define threadIdx (::dim3(::emulated::current->index))
#define blockIdx (::emulated::current->block->index)
#define gridDim (::emulated::current->block->grid)

inline void __syncthreads() { emulated::yield(emulated::At::kBlockBarrier); }
inline void __syncwarp() { emulated::yield(emulated::At::kWarpBarrier); }
inline void __nanosleep(unsigned) {}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = (static_cast<uint64_t>(high) << 32) | low;
  return static_cast<unsigned>(both >> (shift & 31));
}

template <typename Word>
Word __ldca(const Word* address) {
  Word word;
  emulated::read(address, &word, sizeof word);
  return word;
}
template <typename Word>
void __stwb(Word* address, Word value) {
  emulated::write(address, &value, sizeof value);
}
