#include "base/call.hpp"

#include <cstdio>

namespace hdpcomm {

const char* opName(OpCode op) {
  switch (op) {
    case OpCode::kPointToPoint:
      return "send/recv";
    case OpCode::kBarrier:
      return "barrier";
    case OpCode::kAllGather:
      return "all_gather";
    case OpCode::kReduceScatter:
      return "reduce_scatter";
    case OpCode::kAllReduce:
      return "all_reduce";
    case OpCode::kBroadcast:
      return "broadcast";
    case OpCode::kReduce:
      return "reduce";
    case OpCode::kGather:
      return "gather";
    case OpCode::kScatter:
      return "scatter";
    case OpCode::kAllToAll:
      return "all_to_all";
    case OpCode::kResync:
      return "resync";
  }
  return "unknown operation";
}

const char* redOpName(RedOp op) {
  switch (op) {
    case RedOp::kSum:
      return "sum";
    case RedOp::kProd:
      return "prod";
    case RedOp::kMin:
      return "min";
    case RedOp::kMax:
      return "max";
    case RedOp::kAvg:
      return "avg";
    case RedOp::kNone:
      break;
  }
  return "none";
}

const char* algorithmName(Algorithm algorithm) {
  static constexpr const char* kNames[kNumAlgorithms] = {
      "auto",  "ring",         "direct", "binomial",     "dissemination", "recursive",
      "bruck", "rabenseifner", "chain",  "hierarchical", "one_shot",      "two_shot"};
  const auto index = static_cast<size_t>(algorithm);
  return index < kNumAlgorithms ? kNames[index] : "unknown algorithm";
}

std::string describe(const Call& call) {
  std::string text = opName(call.op);
  text += "(" + std::to_string(call.count) + " x " + dtypeName(call.dtype);
  if (call.redop != RedOp::kNone) text += std::string(", ") + redOpName(call.redop);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  if (call.algorithm != Algorithm::kAuto) text += std::string(", ") + algorithmName(call.algorithm);
  text += ")";
  char subset[48];
  std::snprintf(subset, sizeof subset, " on %d ranks [subset %08x]", call.group_size,
                static_cast<unsigned>(call.subset_hash));
  text += subset;
  return text;
}

std::string listOf(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < 32; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return ranks.size() > 32 ? text + ", ..." : text;
}

}  // namespace hdpcomm
