#include "hdpcomm/comm/communicator.hpp"

#include <numeric>

namespace hdpcomm {
namespace {

// Of the ordered list: the splitmix64 finaliser chained over it.
uint64_t hashRanks(const std::vector<int>& ranks) {
  uint64_t hash = 0x9e3779b97f4a7c15ULL * (ranks.size() + 1);
  for (const int rank : ranks) {
    uint64_t x = hash ^ static_cast<uint64_t>(rank);
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    hash = x ^ (x >> 31);
  }
  return hash;
}

Ranks allRanks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<const std::vector<int>>(std::move(ranks));
}

}  // namespace

Communicator::Communicator(std::shared_ptr<World> world)
    : world_(std::move(world)),
      ranks_(allRanks(world_->size())),
      rank_(world_->rank()),
      hash_(hashRanks(*ranks_)) {}

Communicator::Communicator(std::shared_ptr<World> world, Ranks ranks, int rank)
    : world_(std::move(world)), ranks_(std::move(ranks)), rank_(rank), hash_(hashRanks(*ranks_)) {}

std::shared_ptr<Communicator> Communicator::subset(std::span<const int> positions) const {
  if (positions.empty()) {
    throwInvalidUsage("subset() got no ranks; give at least one of 0.." +
                      std::to_string(size() - 1));
  }
  uint64_t seen[64] = {};  // worlds have up to 4096 ranks
  std::vector<int> ranks;
  ranks.reserve(positions.size());
  int own = -1;
  for (size_t i = 0; i < positions.size(); ++i) {
    const int position = positions[i];
    checkPosition(position, "subset");
    uint64_t& word = seen[position / 64];
    const uint64_t bit = 1ULL << (position % 64);
    if ((word & bit) != 0) {
      throwInvalidUsage("subset() got rank " + std::to_string(position) +
                        " twice; each rank may stand in the list once");
    }
    word |= bit;
    if (position == rank_) own = static_cast<int>(i);
    ranks.push_back((*ranks_)[static_cast<size_t>(position)]);
  }
  if (own < 0) return nullptr;
  return std::shared_ptr<Communicator>(
      new Communicator(world_, std::make_shared<const std::vector<int>>(std::move(ranks)), own));
}

void Communicator::checkPosition(int position, const char* what) const {
  if (position >= 0 && position < size()) return;
  throwInvalidUsage(std::string(what) + "() got rank " + std::to_string(position) +
                    ", but this communicator has ranks 0.." + std::to_string(size() - 1) +
                    " (positions in it, not global ranks)");
}

Communicator::Plan Communicator::planCollective(OpCode op, size_t count, DType dtype, RedOp redop,
                                                int root, Algorithm algorithm) const {
  if (root >= 0 || op == OpCode::kBroadcast || op == OpCode::kReduce || op == OpCode::kGather ||
      op == OpCode::kScatter) {
    checkPosition(root, opName(op));
  }
  ScheduleRequest request;
  request.op = op;
  request.algorithm = algorithm;
  request.group_size = size();
  request.rank = rank_;
  request.count = count;
  request.element_bytes = dtypeBytes(dtype);
  request.root = root;
  request.average = redop == RedOp::kAvg;
  Plan plan;
  plan.schedule = world_->schedule(request);
  plan.call.subset_hash = hash_;
  plan.call.count = count;
  plan.call.op = op;
  plan.call.dtype = dtype;
  plan.call.redop = redop;
  plan.call.algorithm = plan.schedule->algorithm;
  plan.call.root = static_cast<int16_t>(root);
  plan.call.group_size = static_cast<uint16_t>(size());
  return plan;
}

Communicator::Plan Communicator::planAllToAll(size_t count, DType dtype,
                                              std::vector<size_t> out_counts,
                                              std::vector<size_t> in_counts,
                                              Algorithm algorithm) const {
  ScheduleRequest request;
  request.op = OpCode::kAllToAll;
  request.algorithm = algorithm;
  request.group_size = size();
  request.rank = rank_;
  request.count = count;
  request.element_bytes = dtypeBytes(dtype);
  request.in_counts = std::move(in_counts);
  request.out_counts = std::move(out_counts);
  Plan plan;
  plan.schedule = world_->schedule(request);
  plan.call.subset_hash = hash_;
  plan.call.count = count;  // 0 when ragged: the pairs' sizes are checked message by message
  plan.call.op = OpCode::kAllToAll;
  plan.call.dtype = dtype;
  plan.call.algorithm = plan.schedule->algorithm;
  plan.call.group_size = static_cast<uint16_t>(size());
  return plan;
}

std::shared_ptr<Work> Communicator::collective(OpCode op, const Operands& operands, RedOp redop,
                                               int root, Algorithm algorithm,
                                               bool background) const {
  Plan plan = planCollective(op, operands.count, operands.dtype, redop, root, algorithm);
  auto work = std::make_shared<CollectiveWork>(plan.call, ranks_, std::move(plan.schedule),
                                               operands.in, operands.out);
  world_->submit(work, background);
  return work;
}

std::shared_ptr<Work> Communicator::allToAll(const Operands& operands,
                                             std::vector<size_t> out_counts,
                                             std::vector<size_t> in_counts, Algorithm algorithm,
                                             bool background) const {
  Plan plan = planAllToAll(operands.count, operands.dtype, std::move(out_counts),
                           std::move(in_counts), algorithm);
  auto work = std::make_shared<CollectiveWork>(plan.call, ranks_, std::move(plan.schedule),
                                               operands.in, operands.out);
  world_->submit(work, background);
  return work;
}

int Communicator::globalRank(int position, const char* what) const {
  checkPosition(position, what);
  return (*ranks_)[static_cast<size_t>(position)];
}

std::vector<ExchangeWork::Message> Communicator::toWorld(std::span<const Message> messages,
                                                         const char* what) const {
  std::vector<ExchangeWork::Message> result;
  result.reserve(messages.size());
  for (const Message& message : messages) {
    ExchangeWork::Message translated;
    translated.peer = globalRank(message.peer, what);
    translated.data = static_cast<std::byte*>(message.data);
    translated.count = message.count;
    translated.dtype = message.dtype;
    result.push_back(translated);
  }
  return result;
}

Call Communicator::planExchange(std::span<const Message> sends,
                                std::span<const Message> recvs) const {
  Call call;
  call.subset_hash = hash_;
  call.group_size = static_cast<uint16_t>(size());
  if (sends.size() + recvs.size() == 1) {  // for messages about it
    const Message& only = sends.empty() ? recvs[0] : sends[0];
    call.count = only.count;
    call.dtype = only.dtype;
  }
  return call;
}

std::shared_ptr<Work> Communicator::exchange(std::span<const Message> sends,
                                             std::span<const Message> recvs,
                                             bool background) const {
  auto work = std::make_shared<ExchangeWork>(planExchange(sends, recvs), ranks_,
                                             toWorld(sends, "send"), toWorld(recvs, "recv"));
  world_->submit(work, background);
  return work;
}

}  // namespace hdpcomm
