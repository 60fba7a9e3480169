// Kernels that read the buffers of several ranks where they lie (peer-mapped memory), for
// collectives in one or two shots. They do the maths only: the caller's stream has waited until
// every input is written and every output may be, and signals afterwards.
//
// There is no variant with a barrier inside the kernel for large operands: streams may share
// hardware queues, in which a kernel can be stuck behind the one that waits for it, and processes
// share a GPU by time slices of milliseconds (CUDA C++ Programming Guide, "Asynchronous Concurrent
// Execution"). Waiting is left to the stream memory operations of the transport, which take no SM;
// small operands are another matter (relay.hpp).
#pragma once

#include <cstdint>

#include "base/call.hpp"

namespace hdpcomm::kernels {

inline constexpr int kMaxPeers = 64;

// outputs[j][i] = inputs[0][i] op inputs[1][i] op ... op inputs[n-1][i] for every output; kAvg sums
// and divides by n.
//
// Folded from left to right in the order of `inputs`, in fp32 for 16-bit floats, rounded once, so
// ranks that list the inputs in the same order get the same bits. An output may be one of the
// inputs; no other overlap.
//   all-reduce, one shot:   every rank: all inputs, one output
//   all-reduce, two shots:  rank r: part r of all inputs, part r of all outputs
//   reduce-scatter:         rank r: part r of all inputs, one output
struct FoldArgs {
  const void* inputs[kMaxPeers] = {};
  void* outputs[kMaxPeers] = {};
  int num_inputs = 0;
  int num_outputs = 0;
  int64_t count = 0;
  DType dtype = DType::kFloat32;
  RedOp op = RedOp::kSum;
};

void foldCpu(const FoldArgs& args);
// Enqueues on `stream` (a cudaStream_t). Throws InvalidUsage or, when the launch fails,
// DeviceError.
void foldCuda(const FoldArgs& args, void* stream);
void checkFold(const FoldArgs& args);  // shared by both

// out[p * stride ..] = inputs[p][0 .. bytes) for every p: an all-gather, or a part of one if stride
// is above `bytes`. An input that already is its place in `out` is skipped. `first` is the input
// that is read first; each rank gives its own number, so that they do not all read the same peer at
// the same time.
struct CollectArgs {
  const void* inputs[kMaxPeers] = {};
  int num_inputs = 0;
  int first = 0;
  void* out = nullptr;
  int64_t bytes = 0;
  int64_t stride = 0;
};

void collectCpu(const CollectArgs& args);
void collectCuda(const CollectArgs& args, void* stream);
void checkCollect(const CollectArgs& args);

// A small put in one launch: copies `bytes` to `dst`, then stores `value` to `flag` with release
// order at system scope, so that readers of the flag on this GPU, on a peer or on the host see the
// bytes. Runs as one block, for messages up to some ten KiB.
struct PutArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t bytes = 0;
  uint32_t* flag = nullptr;
  uint32_t value = 0;
};

void putCpu(const PutArgs& args);
void putCuda(const PutArgs& args, void* stream);
void checkPut(const PutArgs& args);

}  // namespace hdpcomm::kernels
