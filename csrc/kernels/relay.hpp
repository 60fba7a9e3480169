// Small messages between ranks that map each other's memory, without an operation of the stream for
// each wait, copy and flag: one kernel waits for flags, copies and sets flags.
//
// A flag is 0 or 1. Who waits for it resets it. A kernel that waits takes a place on the GPU until
// its peer has done its part, as little as a block of 256 threads for each message. Processes that
// share a GPU by time slices would each use up theirs: they go without (join_devices.cpp).
#pragma once

#include <cstdint>

#include "base/call.hpp"
#include "kernels/peers.hpp"

namespace hdpcomm::kernels {

// Waits until *wait is 1 and sets it to 0, then dst = src, or operand op src, then *set = 1 with
// release order at system scope: readers of the flag on this GPU, on a peer or on the host see the
// bytes. Flags may be null.
struct RelayItem {
  void* dst = nullptr;
  const void* src = nullptr;
  const void* operand = nullptr;
  int64_t bytes = 0;
  uint32_t* wait = nullptr;
  uint32_t* set = nullptr;
};

inline constexpr int kMaxItems = 64;

// Messages that wait for nothing but their own flags: each runs in a block of its own. dtype and op
// are those of items with an operand.
struct RelayArgs {
  RelayItem items[kMaxItems] = {};
  int num_items = 0;
  DType dtype = DType::kUint8;
  RedOp op = RedOp::kNone;
};

// This rank's operand to the peers, then what the peers have sent is combined, all in one block:
// `pushes` first, then out = inputs[0] op inputs[1] .. of the dtype once each *waits[i] was 1 (it
// is reset), then each *sets[i] = 1. Folded as FoldArgs says. `out` may be a source of the pushes.
struct PushFoldArgs {
  RelayItem pushes[kMaxPeers] = {};
  int num_pushes = 0;
  const void* inputs[kMaxPeers] = {};
  uint32_t* waits[kMaxPeers] = {};
  uint32_t* sets[kMaxPeers] = {};
  int num_inputs = 0;
  void* out = nullptr;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  RedOp op = RedOp::kSum;
};

// Enqueue on `stream` (a cudaStream_t). Throw InvalidUsage or, when the launch fails, DeviceError.
void relayCuda(const RelayArgs& args, void* stream);
void pushFoldCuda(const PushFoldArgs& args, void* stream);

// What happens between the flags of an item, on the CPU.
void relayItemCpu(const RelayItem& item, DType dtype, RedOp op);
// The fold of these.
FoldArgs foldOf(const PushFoldArgs& args);

void checkRelay(const RelayArgs& args);
void checkPushFold(const PushFoldArgs& args);

}  // namespace hdpcomm::kernels
