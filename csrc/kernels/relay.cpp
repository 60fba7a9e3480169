#include "kernels/relay.hpp"

#include <cstring>
#include <string>

#include "base/error.hpp"
#include "kernels/reduce.hpp"

namespace hdpcomm::kernels {
namespace {

void checkItems(const char* what, int count, int most, const RelayItem* items) {
  if (count < 0 || count > most) {
    throwInvalidUsage(std::to_string(count) + " " + what + "; expected at most " +
                      std::to_string(most));
  }
  for (int i = 0; i < count; ++i) {
    checkCount(what, items[i].bytes);
    for (const uint32_t* flag : {items[i].wait, items[i].set}) {
      if (reinterpret_cast<uintptr_t>(flag) % sizeof(uint32_t) != 0) {
        throwInvalidUsage("a flag of small messages must lie at a multiple of 4 bytes");
      }
    }
  }
}

}  // namespace

void checkRelay(const RelayArgs& args) {
  checkItems("small messages", args.num_items, kMaxItems, args.items);
  for (int i = 0; i < args.num_items; ++i) {
    if (args.items[i].operand != nullptr) reduceFunction(args.dtype, args.op);  // throws
  }
}

void checkPushFold(const PushFoldArgs& args) {
  checkItems("pushed messages", args.num_pushes, kMaxPeers, args.pushes);
  checkFold(foldOf(args));
}

void relayItemCpu(const RelayItem& item, DType dtype, RedOp op) {
  if (item.bytes == 0) return;
  if (item.operand == nullptr) {
    std::memcpy(item.dst, item.src, static_cast<size_t>(item.bytes));
    return;
  }
  const auto count = item.bytes / static_cast<int64_t>(dtypeBytes(dtype));
  reduceCpu({item.dst, item.operand, item.src, count, dtype, op});
}

FoldArgs foldOf(const PushFoldArgs& args) {
  FoldArgs fold;
  fold.num_inputs = args.num_inputs;
  for (int i = 0; i < args.num_inputs; ++i) fold.inputs[i] = args.inputs[i];
  fold.num_outputs = 1;
  fold.outputs[0] = args.out;
  fold.count = args.count;
  fold.dtype = args.dtype;
  fold.op = args.op;
  return fold;
}

}  // namespace hdpcomm::kernels
