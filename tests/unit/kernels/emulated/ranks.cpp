// Small messages and reductions among 2 to 8 ranks, by the kernels of relay.cu on the memory of
// ranks_shim/cuda_runtime.h. usage: driver FIRST_SEED SEEDS
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "device/cuda/loading.hpp"
#include "kernels/relay.hpp"

// Kernels are here when the program starts.
bool hdpcomm::cuda::enterKernel(Kernel&) { return true; }

namespace {

using namespace hdpcomm;
using namespace hdpcomm::kernels;

constexpr size_t kPad = 32;  // kernels load whole words
constexpr size_t kSlotBytes = 512;
constexpr int kSlots = 2;

std::mt19937 source;
int64_t pick(int64_t least, int64_t most) {
  return least + static_cast<int64_t>(source() % static_cast<uint64_t>(most - least + 1));
}

// Memory at any alignment of its elements, with known bytes around it.
struct Buffer {
  explicit Buffer(size_t bytes, size_t element = 1) : bytes(bytes), all(bytes + 2 * kPad + 16) {
    for (auto& byte : all) byte = static_cast<unsigned char>(source());
    offset = kPad + static_cast<size_t>(pick(0, 15)) / element * element;
    before = all;
  }
  unsigned char* data() { return all.data() + offset; }
  bool intactAround() const {
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i < offset || i >= offset + bytes) && all[i] != before[i]) return false;
    }
    return true;
  }
  size_t bytes;
  size_t offset = 0;
  std::vector<unsigned char> all;
  std::vector<unsigned char> before;
};
using BufferPtr = std::shared_ptr<Buffer>;

struct Expected {
  BufferPtr got;
  std::vector<unsigned char> want;
};

struct Pair {
  alignas(64) uint32_t credit[kSlots];
  uint32_t full[kSlots];
  alignas(16) unsigned char slots[kSlots][kSlotBytes + kPad];
  int next_out = 0;
  int next_in = 0;
};

struct World {
  explicit World(int ranks) : size(ranks), pairs(static_cast<size_t>(ranks * ranks)) {
    for (auto& pair : pairs) {
      pair = std::make_unique<Pair>();
      for (int slot = 0; slot < kSlots; ++slot) pair->credit[slot] = 1, pair->full[slot] = 0;
    }
  }
  // What lies with `owner` and concerns it and `peer`.
  Pair& of(int owner, int peer) { return *pairs[static_cast<size_t>(owner * size + peer)]; }
  RelayItem put(int rank, int peer, const BufferPtr& data) {
    const int slot = of(rank, peer).next_out++ % kSlots;
    return {of(peer, rank).slots[slot],
            data->data(),
            nullptr,
            static_cast<int64_t>(data->bytes),
            &of(rank, peer).credit[slot],
            &of(peer, rank).full[slot]};
  }
  RelayItem get(int rank, int peer, void* to, size_t bytes) {
    const int slot = of(rank, peer).next_in++ % kSlots;
    return {to,
            of(rank, peer).slots[slot],
            nullptr,
            static_cast<int64_t>(bytes),
            &of(rank, peer).full[slot],
            &of(peer, rank).credit[slot]};
  }
  int size;
  std::vector<std::unique_ptr<Pair>> pairs;
};

std::vector<Expected> expected;
std::vector<BufferPtr> kept;

BufferPtr fresh(size_t bytes, size_t element = 1) {
  kept.push_back(std::make_shared<Buffer>(bytes, element));
  return kept.back();
}

BufferPtr floats(size_t count) {
  BufferPtr buffer = fresh(4 * count, 4);
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(pick(-9, 9));
    std::memcpy(buffer->data() + 4 * i, &value, 4);
  }
  return buffer;
}

// Each rank sends to the rank `by` further, up to kSlots messages; some are added to an operand.
void exchange(World& world, int by, int messages) {
  std::vector<RelayArgs> args(static_cast<size_t>(world.size));
  const bool adds = pick(0, 2) == 0;
  for (auto& each : args) {
    if (adds) each.dtype = DType::kFloat32, each.op = RedOp::kSum;
  }
  for (int m = 0; m < messages; ++m) {
    const size_t count = static_cast<size_t>(pick(0, 3) == 0 ? 0 : pick(1, adds ? 60 : 400));
    for (int rank = 0; rank < world.size; ++rank) {
      const int to = (rank + by) % world.size;
      BufferPtr from = adds ? floats(count) : fresh(count);
      RelayArgs& mine = args[static_cast<size_t>(rank)];
      RelayArgs& theirs = args[static_cast<size_t>(to)];
      mine.items[mine.num_items++] = world.put(rank, to, from);
      BufferPtr got = fresh(from->bytes, adds ? 4 : 1);
      RelayItem item = world.get(to, rank, got->data(), from->bytes);
      std::vector<unsigned char> want(from->data(), from->data() + from->bytes);
      if (adds) {
        BufferPtr operand = floats(count);
        item.operand = operand->data();
        for (size_t i = 0; i < count; ++i) {
          float a, b;
          std::memcpy(&a, operand->data() + 4 * i, 4);
          std::memcpy(&b, from->data() + 4 * i, 4);
          a += b;
          std::memcpy(want.data() + 4 * i, &a, 4);
        }
      }
      theirs.items[theirs.num_items++] = item;
      expected.push_back({got, want});
    }
  }
  for (int rank = 0; rank < world.size; ++rank) {
    emulated::calling = rank;
    relayCuda(args[static_cast<size_t>(rank)], nullptr);
  }
}

// The sum over some ranks, in their order; in place or not.
void reduce(World& world) {
  std::vector<int> members;
  for (int rank = 0; rank < world.size; ++rank) {
    if (pick(0, 3) != 0) members.push_back(rank);
  }
  if (members.size() < 2) members = {0, 1};
  std::shuffle(members.begin(), members.end(), source);
  const auto count = static_cast<size_t>(pick(1, 70));
  std::vector<BufferPtr> own;
  std::vector<float> sum(count);
  for (size_t m = 0; m < members.size(); ++m) own.push_back(floats(count));
  for (const BufferPtr& each : own) {
    for (size_t i = 0; i < count; ++i) {
      float value;
      std::memcpy(&value, each->data() + 4 * i, 4);
      sum[i] += value;
    }
  }
  std::vector<unsigned char> want(4 * count);
  std::memcpy(want.data(), sum.data(), want.size());
  const bool in_place = pick(0, 1) == 0;
  for (size_t m = 0; m < members.size(); ++m) {
    const BufferPtr out = in_place ? own[m] : fresh(4 * count, 4);
    PushFoldArgs args;
    args.num_inputs = static_cast<int>(members.size());
    args.out = out->data();
    args.count = static_cast<int64_t>(count);
    for (size_t p = 0; p < members.size(); ++p) {
      if (p == m) {
        args.inputs[p] = own[m]->data();
        continue;
      }
      args.pushes[args.num_pushes++] = world.put(members[m], members[p], own[m]);
      const RelayItem item = world.get(members[m], members[p], nullptr, own[m]->bytes);
      args.inputs[p] = item.src;
      args.waits[p] = item.wait;
      args.sets[p] = item.set;
    }
    emulated::calling = members[m];
    pushFoldCuda(args, nullptr);
    expected.push_back({out, want});
  }
}

void runSeed(unsigned seed) {
  source.seed(seed);
  emulated::order.seed(seed);
  expected.clear();
  kept.clear();
  emulated::ever_read.clear();
  emulated::known_read.clear();
  World world(static_cast<int>(pick(2, 8)));
  emulated::streams.assign(static_cast<size_t>(world.size), {});
  emulated::running.clear();
  emulated::running.resize(static_cast<size_t>(world.size));
  for (int64_t op = pick(3, 6); op > 0; --op) {
    if (pick(0, 1) == 0) {
      reduce(world);
    } else {
      exchange(world, static_cast<int>(pick(0, world.size - 1)), static_cast<int>(pick(1, kSlots)));
    }
  }
  emulated::runAll();
  for (const Expected& each : expected) {
    if (std::memcmp(each.got->data(), each.want.data(), each.want.size()) != 0) {
      std::fprintf(stderr, "seed %u: a message differs\n", seed);
      std::exit(2);
    }
  }
  for (const auto& pair : world.pairs) {
    for (int slot = 0; slot < kSlots; ++slot) {
      if (pair->credit[slot] == 1 && pair->full[slot] == 0) continue;
      std::fprintf(stderr, "seed %u: a flag is not as it was\n", seed);
      std::exit(2);
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  const int first = std::atoi(arguments[1]);
  const int seeds = std::atoi(arguments[2]);
  for (int seed = first; seed < first + seeds; ++seed) runSeed(static_cast<unsigned>(seed));
  std::printf("%d seeds right\n", seeds);
}
