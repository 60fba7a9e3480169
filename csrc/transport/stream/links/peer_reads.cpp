#include "transport/stream/links/peer_reads.hpp"

#include <algorithm>

#include "transport/stream/launch.hpp"

namespace hdpcomm::device {
namespace {

// Pieces and parts begin at multiples of this, so that kernels can load whole vectors.
constexpr size_t kAlign = 128;

size_t alignDown(size_t bytes) { return bytes / kAlign * kAlign; }
size_t alignUp(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

struct Extent {
  size_t begin;
  size_t end;
};

}  // namespace

class PeerReads::Group {
 public:
  Group(const PeerReads& owner, const Operation& operation)
      : op_(operation), arena_(owner.arena_), place_(owner.placeOf(operation)) {
    const std::vector<int>& ranks = *op_.ranks;
    rank_ = static_cast<int>(std::find(ranks.begin(), ranks.end(), owner.rank_) - ranks.begin());
  }

  const Operation& op() const { return op_; }
  int size() const { return static_cast<int>(op_.ranks->size()); }
  int rank() const { return rank_; }  // in the group
  int world(int group_rank) const { return (*op_.ranks)[static_cast<size_t>(group_rank)]; }
  bool inPlace() const { return place_.has_value(); }
  std::byte* window() const { return arena_.window(world(rank_)); }
  // A block, or the whole operand of an all-reduce.
  size_t bytes() const { return op_.call.count * dtypeBytes(op_.call.dtype); }

  // Address of byte `whole` of a member's operand; in the window it lies at offset `piece`.
  std::byte* operand(int group_rank, size_t whole, size_t piece) const {
    return inPlace() ? arena_.landing(world(group_rank)) + *place_ + whole
                     : arena_.window(world(group_rank)) + piece;
  }

  // Calls `visit(begin, bytes)` for each piece of a block; the pieces of `blocks` blocks share the
  // window.
  template <typename Visit>
  void forPieces(size_t blocks, Visit visit) const {
    const size_t room = alignDown(arena_.config().window_bytes / blocks);
    const size_t most = inPlace() ? bytes() : std::min(bytes(), room);
    for (size_t at = 0; at < bytes(); at += most) visit(at, std::min(most, bytes() - at));
  }

  // Part `i` of `total` bytes that the members share.
  Extent part(int i, size_t total) const {
    const auto parts = static_cast<size_t>(size());
    const size_t most = alignUp((total + parts - 1) / parts);
    const size_t begin = std::min(total, most * static_cast<size_t>(i));
    return {begin, std::min(total, begin + most)};
  }

  kernels::FoldArgs foldOf(size_t fold_bytes) const {
    kernels::FoldArgs args;
    args.num_inputs = size();
    args.num_outputs = 1;
    args.count = static_cast<int64_t>(fold_bytes / dtypeBytes(op_.call.dtype));
    args.dtype = op_.call.dtype;
    args.op = op_.call.redop;
    return args;
  }

 private:
  const Operation& op_;
  const Arena& arena_;
  std::optional<uint64_t> place_;
  int rank_;
};

PeerReads::PeerReads(DevicePtr device, const Arena& arena, int rank)
    : device_(std::move(device)), arena_(arena), rank_(rank) {}

Lane& PeerReads::lane() {
  if (!lane_) lane_.emplace(device_);
  return *lane_;
}

std::optional<uint64_t> PeerReads::placeOf(const Operation& operation) const {
  const Call& call = operation.call;
  const size_t block = call.count * dtypeBytes(call.dtype);
  const size_t all = block * operation.ranks->size();
  const size_t in_bytes = call.op == OpCode::kReduceScatter ? all : block;
  const std::byte* zone = arena_.landing(rank_);
  const size_t zone_bytes = arena_.config().landing_bytes;
  if (operation.in < zone || operation.in + in_bytes > zone + zone_bytes) return std::nullopt;
  const auto offset = static_cast<uint64_t>(operation.in - zone);
  // This rank writes its own block of a reduce-scatter's input at most, which nobody else reads.
  if (call.op == OpCode::kReduceScatter) return offset;
  if (call.algorithm == Algorithm::kTwoShot) {
    return operation.in == operation.out ? std::optional(offset) : std::nullopt;
  }
  const size_t out_bytes = call.op == OpCode::kAllGather ? all : block;
  if (overlap(operation.in, in_bytes, operation.out, out_bytes)) return std::nullopt;
  return offset;
}

size_t PeerReads::bytesWith(const Operation& operation, int group_rank) const {
  const Group group(*this, operation);
  if (operation.call.algorithm != Algorithm::kTwoShot) return group.bytes();
  size_t total = 0;
  group.forPieces(1, [&](size_t, size_t bytes) {
    for (const int i : {group.rank(), group_rank}) {
      const Extent part = group.part(i, bytes);
      total += part.end - part.begin;
    }
  });
  return total;
}

void PeerReads::run(const Operation& operation, Lane& lane, const WaitCheck& check) {
  const Group group(*this, operation);
  switch (operation.call.op) {
    case OpCode::kAllGather:
      return gather(group, lane, check);
    case OpCode::kReduceScatter:
      return reduceScatter(group, lane, check);
    default:
      return operation.call.algorithm == Algorithm::kTwoShot ? reduceTwice(group, lane, check)
                                                             : reduceOnce(group, lane, check);
  }
}

// Operations that one piece adds to the lane: two meetings, a copy for each block, and a kernel.
size_t PeerReads::operationsOf(const Group& group) {
  return 7 * static_cast<size_t>(group.size()) + 4;
}

// Every member signals every other one: what all streams did before the meeting comes before what
// any of them does after it.
void PeerReads::meet(const Group& group, uint32_t PairFlags::* flag, Stream stream) {
  std::vector<FlagOp> ops;
  for (int i = 1; i < group.size(); ++i) {
    const int peer = group.world((group.rank() + i) % group.size());
    if (std::find(met_.begin(), met_.end(), peer) == met_.end()) met_.push_back(peer);
    ops.push_back(FlagOp::write(&(arena_.flags(peer, rank_).*flag), 1));
  }
  for (int i = 1; i < group.size(); ++i) {
    uint32_t* mine = &(arena_.flags(rank_, group.world((group.rank() + i) % group.size())).*flag);
    ops.push_back(FlagOp::wait(mine, 1));
    ops.push_back(FlagOp::write(mine, 0));
  }
  device_->flagOps(stream, ops);
}

void PeerReads::copyPart(std::byte* to, const std::byte* from, size_t at, size_t bytes,
                         Stream stream, Site site) {
  if (bytes > 0) device_->copy(to + at, from + at, bytes, stream, site);
}

void PeerReads::gather(const Group& group, Lane& lane, const WaitCheck& check) {
  const Stream stream = lane.stream();
  const Operation& op = group.op();
  group.forPieces(1, [&](size_t at, size_t bytes) {
    lane.pass(operationsOf(group), check);
    if (!group.inPlace()) copyPart(group.window(), op.in + at, 0, bytes, stream);
    meet(group, &PairFlags::published, stream);
    kernels::CollectArgs args;
    args.num_inputs = group.size();
    args.first = group.rank();
    args.out = op.out + at;
    args.bytes = static_cast<int64_t>(bytes);
    args.stride = static_cast<int64_t>(group.bytes());
    for (int i = 0; i < group.size(); ++i) {
      args.inputs[i] = i == group.rank() ? op.in + at : group.operand(i, at, 0);
    }
    launchCollect(*device_, args, stream);
    meet(group, &PairFlags::consumed, stream);
  });
}

void PeerReads::reduceScatter(const Group& group, Lane& lane, const WaitCheck& check) {
  const Stream stream = lane.stream();
  const Operation& op = group.op();
  const size_t block = group.bytes();
  const auto ranks = static_cast<size_t>(group.size());
  const auto own = static_cast<size_t>(group.rank());
  group.forPieces(ranks, [&](size_t at, size_t bytes) {
    lane.pass(operationsOf(group), check);
    if (!group.inPlace() && bytes == block) {  // all but the own block, at once
      copyPart(group.window(), op.in, 0, own * block, stream);
      copyPart(group.window(), op.in, (own + 1) * block, (ranks - own - 1) * block, stream);
    } else if (!group.inPlace()) {
      for (size_t i = 0; i < ranks; ++i) {
        if (i == own) continue;
        copyPart(group.window() + i * bytes, op.in + i * block + at, 0, bytes, stream);
      }
    }
    meet(group, &PairFlags::published, stream);
    kernels::FoldArgs args = group.foldOf(bytes);
    for (int i = 0; i < group.size(); ++i) {
      args.inputs[i] = i == group.rank() ? op.in + own * block + at
                                         : group.operand(i, own * block + at, own * bytes);
    }
    args.outputs[0] = op.out + at;
    launchFold(*device_, args, stream);
    meet(group, &PairFlags::consumed, stream);
  });
}

void PeerReads::reduceOnce(const Group& group, Lane& lane, const WaitCheck& check) {
  const Stream stream = lane.stream();
  const Operation& op = group.op();
  group.forPieces(1, [&](size_t at, size_t bytes) {
    lane.pass(operationsOf(group), check);
    if (!group.inPlace()) copyPart(group.window(), op.in + at, 0, bytes, stream);
    meet(group, &PairFlags::published, stream);
    kernels::FoldArgs args = group.foldOf(bytes);
    for (int i = 0; i < group.size(); ++i) {
      args.inputs[i] = i == group.rank() ? op.in + at : group.operand(i, at, 0);
    }
    args.outputs[0] = op.out + at;
    launchFold(*device_, args, stream);
    meet(group, &PairFlags::consumed, stream);
  });
}

void PeerReads::reduceTwice(const Group& group, Lane& lane, const WaitCheck& check) {
  const Stream stream = lane.stream();
  const Operation& op = group.op();
  group.forPieces(1, [&](size_t at, size_t bytes) {
    lane.pass(operationsOf(group), check);
    const Extent own = group.part(group.rank(), bytes);
    if (!group.inPlace()) {
      copyPart(group.window(), op.in + at, 0, own.begin, stream);
      copyPart(group.window(), op.in + at, own.end, bytes - own.end, stream);
    }
    meet(group, &PairFlags::published, stream);
    kernels::FoldArgs args = group.foldOf(own.end - own.begin);
    args.num_outputs = group.size();
    for (int i = 0; i < group.size(); ++i) {
      std::byte* theirs = group.operand(i, at + own.begin, own.begin);
      args.inputs[i] = i == group.rank() ? op.in + at + own.begin : theirs;
      args.outputs[i] = i == group.rank() ? op.out + at + own.begin : theirs;
    }
    if (args.count > 0) launchFold(*device_, args, stream);
    meet(group, &PairFlags::consumed, stream);
    if (!group.inPlace()) {
      copyPart(op.out + at, group.window(), 0, own.begin, stream);
      copyPart(op.out + at, group.window(), own.end, bytes - own.end, stream);
    }
  });
}

void PeerReads::release(Stream stream) const {
  std::vector<FlagOp> ops;
  for (const int peer : met_) {
    PairFlags& mine = arena_.flags(rank_, peer);
    ops.push_back(FlagOp::write(&mine.published, 1));
    ops.push_back(FlagOp::write(&mine.consumed, 1));
  }
  device_->flagOps(stream, ops);
}

}  // namespace hdpcomm::device
