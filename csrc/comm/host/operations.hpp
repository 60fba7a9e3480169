// The collectives as their callers see them, in one table: which tensors each takes and how these
// are divided among the ranks. Every call is checked by it, for host and for device tensors.
#pragma once

#include <vector>

#include "comm/host/communicator.hpp"

namespace hdpcomm {

// A tensor of a call: contiguous memory.
struct TensorView {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::kUint8;
};

struct TensorRule {
  enum class Given : uint8_t {
    kNever,
    kAlways,
    kOptional,  // `out`: without it the result goes to `x`
    kAtRoot,    // the other ranks' is ignored
  };
  Given given = Given::kNever;
  bool per_rank = false;  // one block for each rank; else one block
};

struct OperationRule {
  OpCode op;
  TensorRule x;
  TensorRule out;
  bool rooted = false;
  bool reduces = false;

  bool takesX(bool at_root) const {
    return x.given == TensorRule::Given::kAlways ||
           (x.given == TensorRule::Given::kAtRoot && at_root);
  }
  bool takesOut(bool given, bool at_root) const {
    return out.given == TensorRule::Given::kAlways ||
           (out.given == TensorRule::Given::kOptional && given) ||
           (out.given == TensorRule::Given::kAtRoot && at_root);
  }
  // Whether the operation writes to `x` (broadcast, and reductions in place).
  bool writesX(bool out_given, bool at_root) const;
};

// Throws InvalidUsage for a number that names no collective.
const OperationRule& ruleOf(int op);

// A collective whose tensors fit each other.
struct CollectiveCall {
  Communicator::Operands operands;
  Communicator::Options options;
};

// Elements for and from each rank, of an all_to_all of unequal parts.
struct Splits {
  std::vector<int64_t> out;
  std::vector<int64_t> in;
};

// The call with the tensors of the rank at position `rank`; null where the rule takes none, or
// where none was given. Throws InvalidUsage where their sizes or types do not fit each other on
// `size` ranks, or where they overlap.
CollectiveCall makeCall(const Communicator::Options& options, const TensorView* x,
                        const TensorView* out, int rank, int size);
CollectiveCall makeRaggedCall(const Communicator::Options& options, const TensorView& x,
                              const TensorView& out, const Splits& splits, int size);

}  // namespace hdpcomm
