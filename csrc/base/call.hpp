// What a rank called: the part of an operation that both ends of a message must agree on. It
// travels with every message.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/dtype.hpp"

namespace hdpcomm {

enum class OpCode : uint8_t {
  kPointToPoint,  // send, recv and exchange match each other
  kBarrier,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kResync,  // no collective: brings pairs of ranks into step again
};

enum class RedOp : uint8_t { kSum, kProd, kMin, kMax, kAvg, kNone = 255 };

// out[i] = a[i] op b[i]; out may be a or b.
using ReduceFn = void (*)(void* out, const void* a, const void* b, size_t count);

enum class Algorithm : uint8_t {
  kAuto,
  kRing,
  kDirect,         // all peers in one step
  kBinomial,       // tree
  kDissemination,  // barrier
  kRecursive,      // doubling (all-reduce) or halving (reduce-scatter), with a fold for odd sizes
  kBruck,
  kRabenseifner,  // reduce-scatter + all-gather
  kChain,         // pipelined
  kHierarchical,  // inside the nodes, then across
  kOneShot,       // a kernel reads all peers' memory (peer_reads.hpp)
  kTwoShot,       // ... and writes its part to all of them
};
inline constexpr int kNumAlgorithms = 12;
const char* opName(OpCode op);
const char* redOpName(RedOp op);
const char* algorithmName(Algorithm algorithm);

struct Call {
  uint64_t subset_hash = 0;  // of the ordered global ranks; 0 for point-to-point between two ranks
  uint64_t count = 0;  // elements that every rank must agree on (point-to-point: of the message)
  OpCode op = OpCode::kPointToPoint;
  DType dtype = DType::kUint8;
  RedOp redop = RedOp::kNone;
  Algorithm algorithm = Algorithm::kAuto;  // as chosen; kAuto: it does not apply
  int16_t root = -1;                       // group rank
  uint16_t group_size = 2;

  // Bytewise: three words.
  bool operator==(const Call& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(sizeof(Call) == 24 && std::has_unique_object_representations_v<Call>);

// "all_reduce(16 x float32, sum) on 4 ranks [subset 1f2e3d4c]"
std::string describe(const Call& call);
// "0, 1, 2", for a message; of many ranks the first 32.
std::string listOf(const std::vector<int>& ranks);

}  // namespace hdpcomm
