#include "kernels/peers.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "kernels/reduce.hpp"
#include "kernels/reduce_types.hpp"
#include "kernels/vector_clones.hpp"

namespace hdpcomm::kernels {
namespace {

constexpr int64_t kBlock = 1024;  // elements whose running results stay in the first-level cache

template <RedOp op, typename T>
struct Fold {
  HDP_VECTOR_CLONES static void begin(Wide<T>* acc, const T* in, int64_t count) {
    for (int64_t i = 0; i < count; ++i) acc[i] = widen(in[i]);
  }
  HDP_VECTOR_CLONES static void add(Wide<T>* acc, const T* in, int64_t count) {
    for (int64_t i = 0; i < count; ++i) acc[i] = combine<op, Wide<T>>(acc[i], widen(in[i]));
  }
  HDP_VECTOR_CLONES static void divide(Wide<T>* acc, Wide<T> divisor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) divideElement(acc[i], divisor, acc[i]);
  }
  HDP_VECTOR_CLONES static void end(const Wide<T>* acc, T* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) narrow(acc[i], out[i]);
  }

  static void run(const FoldArgs& args) {
    alignas(64) Wide<T> acc[kBlock];
    for (int64_t at = 0; at < args.count; at += kBlock) {
      const int64_t count = std::min(kBlock, args.count - at);
      begin(acc, static_cast<const T*>(args.inputs[0]) + at, count);
      for (int p = 1; p < args.num_inputs; ++p) {
        add(acc, static_cast<const T*>(args.inputs[p]) + at, count);
      }
      if constexpr (std::is_floating_point_v<Wide<T>>) {
        if (args.op == RedOp::kAvg) divide(acc, static_cast<Wide<T>>(args.num_inputs), count);
      }
      for (int p = 0; p < args.num_outputs; ++p) {
        end(acc, static_cast<T*>(args.outputs[p]) + at, count);
      }
    }
  }
};

void checkPeers(const char* what, int count) {
  if (count < 1 || count > kMaxPeers) {
    throwInvalidUsage(std::to_string(count) + " " + what + "; expected 1 to " +
                      std::to_string(kMaxPeers) + " (larger groups take another algorithm)");
  }
}

}  // namespace

void checkFold(const FoldArgs& args) {
  checkPeers("inputs of a fold", args.num_inputs);
  checkPeers("outputs of a fold", args.num_outputs);
  reduceFunction(args.dtype, args.op);
  checkCount("fold", args.count);
  for (int p = 0; p < args.num_inputs; ++p) {
    checkElementAddress("fold", args.inputs[p], args.dtype);
  }
  for (int p = 0; p < args.num_outputs; ++p) {
    checkElementAddress("fold", args.outputs[p], args.dtype);
  }
}

void foldCpu(const FoldArgs& args) {
  checkFold(args);
  withReduction(args.dtype, args.op,
                [&](auto value, auto tag) { Fold<tag.kOp, decltype(value)>::run(args); });
}

void checkCollect(const CollectArgs& args) {
  checkPeers("inputs of a collect", args.num_inputs);
  checkCount("collect", args.bytes);
  if (args.stride < args.bytes) {
    throwInvalidUsage("the places of a collect are " + std::to_string(args.stride) +
                      " bytes apart; expected at least the " + std::to_string(args.bytes) +
                      " bytes of an input");
  }
  if (args.first < 0 || args.first >= args.num_inputs) {
    throwInvalidUsage("first is " + std::to_string(args.first) + "; expected 0 to " +
                      std::to_string(args.num_inputs - 1));
  }
}

void collectCpu(const CollectArgs& args) {
  checkCollect(args);
  for (int i = 0; i < args.num_inputs && args.bytes > 0; ++i) {
    const int p = (args.first + i) % args.num_inputs;
    char* place = static_cast<char*>(args.out) + p * args.stride;
    if (place != args.inputs[p]) {
      std::memcpy(place, args.inputs[p], static_cast<size_t>(args.bytes));
    }
  }
}

void checkPut(const PutArgs& args) {
  checkCount("put", args.bytes);
  if (args.flag == nullptr || reinterpret_cast<uintptr_t>(args.flag) % sizeof(uint32_t) != 0) {
    throwInvalidUsage("the flag of a put must lie at a multiple of 4 bytes");
  }
}

void putCpu(const PutArgs& args) {
  checkPut(args);
  if (args.bytes > 0) std::memcpy(args.dst, args.src, static_cast<size_t>(args.bytes));
  // Pairs with the acquire load of the thread that waits for the flag: the copy happens before what
  // follows there.
  std::atomic_ref<uint32_t>(*args.flag).store(args.value, std::memory_order_release);
}

}  // namespace hdpcomm::kernels
