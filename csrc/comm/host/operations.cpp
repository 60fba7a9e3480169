#include "comm/host/operations.hpp"

#include <algorithm>
#include <string>

#include "comm/host/overlaps.hpp"

namespace hdpcomm {
namespace {

using Given = TensorRule::Given;

constexpr TensorRule kNone{};
constexpr TensorRule kBlock{Given::kAlways, false};
constexpr TensorRule kBlocks{Given::kAlways, true};
constexpr TensorRule kBlockIfGiven{Given::kOptional, false};
constexpr TensorRule kBlocksAtRoot{Given::kAtRoot, true};

// In the order of OpCode, from kBarrier on.
constexpr OperationRule kRules[] = {
    {OpCode::kBarrier, kNone, kNone},
    {OpCode::kAllGather, kBlock, kBlocks},
    {.op = OpCode::kReduceScatter, .x = kBlocks, .out = kBlock, .reduces = true},
    {.op = OpCode::kAllReduce, .x = kBlock, .out = kBlockIfGiven, .reduces = true},
    {.op = OpCode::kBroadcast, .x = kBlock, .out = kNone, .rooted = true},
    {.op = OpCode::kReduce, .x = kBlock, .out = kBlockIfGiven, .rooted = true, .reduces = true},
    {.op = OpCode::kGather, .x = kBlock, .out = kBlocksAtRoot, .rooted = true},
    {.op = OpCode::kScatter, .x = kBlocksAtRoot, .out = kBlock, .rooted = true},
    {OpCode::kAllToAll, kBlocks, kBlocks},
};
constexpr int kFirst = static_cast<int>(OpCode::kBarrier);
static_assert([] {
  for (size_t i = 0; i < std::size(kRules); ++i) {
    if (static_cast<size_t>(kRules[i].op) != i + kFirst) return false;
  }
  return kRules[std::size(kRules) - 1].op == OpCode::kAllToAll;
}());

std::string elements(size_t count) { return std::to_string(count) + " elements"; }

[[noreturn, gnu::cold]] void throwTypes(const char* name, const TensorView& given,
                                        const TensorView& other) {
  throwInvalidUsage(std::string(name) + " has dtype " + dtypeName(given.dtype) +
                    ", the other tensor " + dtypeName(other.dtype) + "; give equal types");
}

[[noreturn, gnu::cold]] void throwSizes(const OperationRule& rule, const TensorView& x,
                                        const TensorView& out, size_t size) {
  if (!rule.x.per_rank && !rule.out.per_rank) {
    throwInvalidUsage("out has " + elements(out.count) + ", x " + std::to_string(x.count) +
                      "; give equal sizes");
  }
  const std::string name = opName(rule.op);
  if (rule.x.per_rank && rule.out.per_rank) {
    throwInvalidUsage(name + "() got x with " + std::to_string(x.count) + " and out with " +
                      elements(out.count) +
                      "; without splits they must be equal and divisible by the " +
                      std::to_string(size) + " ranks");
  }
  const bool large_x = rule.x.per_rank;
  const TensorView& small = large_x ? out : x;
  const TensorView& large = large_x ? x : out;
  throwInvalidUsage(name + "() got " + (large_x ? "out" : "x") + " with " +
                    std::to_string(small.count) + " and " + (large_x ? "x" : "out") + " with " +
                    elements(large.count) + "; on " + std::to_string(size) + " ranks " +
                    (large_x ? "x" : "out") + " must have " + std::to_string(small.count * size));
}

// None below 0; a plain sum could wrap, and be right by accident.
bool sumUpTo(const std::vector<int64_t>& splits, size_t count) {
  for (const int64_t n : splits) {
    if (n < 0 || static_cast<size_t>(n) > count) return false;
    count -= static_cast<size_t>(n);
  }
  return count == 0;
}

std::vector<size_t> counts(const std::vector<int64_t>& splits, const TensorView& tensor, int size,
                           const char* name) {
  if (splits.size() != static_cast<size_t>(size) || !sumUpTo(splits, tensor.count)) {
    std::string list;
    for (const int64_t n : splits) list += (list.empty() ? "" : ", ") + std::to_string(n);
    throwInvalidUsage("all_to_all() got " + std::string(name) + "=[" + list + "]; it must hold " +
                      std::to_string(size) + " counts, none below 0, that sum up to the tensor's " +
                      elements(tensor.count));
  }
  return {splits.begin(), splits.end()};
}

}  // namespace

const OperationRule& ruleOf(int op) {
  const auto index = static_cast<size_t>(op - kFirst);
  if (op < kFirst || index >= std::size(kRules)) {
    throwInvalidUsage(std::to_string(op) + " is not the number of a collective");
  }
  return kRules[index];
}

bool OperationRule::writesX(bool out_given, bool at_root) const {
  if (out.given == Given::kNever) return !at_root;
  return out.given == Given::kOptional && !out_given && (!rooted || at_root);
}

CollectiveCall makeCall(const Communicator::Options& options, const TensorView* x,
                        const TensorView* out, int rank, int num_ranks) {
  const OperationRule& rule = kRules[static_cast<int>(options.op) - kFirst];
  const auto size = static_cast<size_t>(num_ranks);
  CollectiveCall call{{}, options};
  if (x == nullptr && out == nullptr) return call;
  const TensorView& source = x != nullptr ? *x : *out;
  const TensorView& target = out != nullptr ? *out : *x;
  size_t block = source.count;
  if (x != nullptr && out != nullptr) {
    if (x->dtype != out->dtype) {
      const bool large_x = rule.x.per_rank && !rule.out.per_rank;
      throwTypes(large_x ? "x" : "out", large_x ? *x : *out, large_x ? *out : *x);
    }
    if (rule.x.per_rank) block = rule.out.per_rank ? x->count / size : out->count;
    if (x->count != block * (rule.x.per_rank ? size : 1) ||
        out->count != block * (rule.out.per_rank ? size : 1)) {
      throwSizes(rule, *x, *out, size);
    }
    checkOverlap(rule, *x, *out, rank);
  }
  call.operands.in = source.data;
  call.operands.out = target.data;
  call.operands.count = block;
  call.operands.dtype = source.dtype;
  return call;
}

CollectiveCall makeRaggedCall(const Communicator::Options& options, const TensorView& x,
                              const TensorView& out, const Splits& splits, int size) {
  if (x.dtype != out.dtype) throwTypes("out", out, x);
  CollectiveCall call{{.in = x.data, .out = out.data, .count = 0, .dtype = x.dtype}, options};
  call.operands.in_counts = counts(splits.in, x, size, "in_splits");
  call.operands.out_counts = counts(splits.out, out, size, "out_splits");
  checkOverlap(ruleOf(static_cast<int>(options.op)), x, out, 0);
  return call;
}

}  // namespace hdpcomm
