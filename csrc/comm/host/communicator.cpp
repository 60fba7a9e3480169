#include "comm/host/communicator.hpp"

#include <algorithm>
#include <numeric>

#include "collective/peer_reads.hpp"

namespace hdpcomm {
namespace {

// Hash of the ordered rank list: the splitmix64 finaliser chained over it.
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

// A pointer that owns nothing, for an operation that ends before its caller returns: counting
// owners would cost two atomic operations a message.
Ranks borrow(const Ranks& ranks) { return Ranks(Ranks(), ranks.get()); }

// Whether the named algorithm reads peers' memory; names of other operations are left to
// makeSchedule(), which refuses them.
bool hasPeerReader(const ScheduleRequest& request) {
  const auto& readers = peerReadersOf(request.op);
  if (std::find(readers.begin(), readers.end(), request.algorithm) == readers.end()) return false;
  if (request.group_size > kMaxPeerReaders) {
    throwInvalidUsage(std::string(opName(request.op)) + "() got algorithm '" +
                      algorithmName(request.algorithm) + "' for " +
                      std::to_string(request.group_size) + " ranks; its kernels read up to " +
                      std::to_string(kMaxPeerReaders) + ": take another one, or 'auto'");
  }
  return true;
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
      hash_(hashRanks(*ranks_)),
      nodes_(world_->schedules().nodesOf(*ranks_)) {}

Communicator::Communicator(std::shared_ptr<World> world, Ranks ranks, int rank)
    : world_(std::move(world)),
      ranks_(std::move(ranks)),
      rank_(rank),
      hash_(hashRanks(*ranks_)),
      nodes_(world_->schedules().nodesOf(*ranks_)) {}

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

CollectivePlan Communicator::plan(const Operands& operands, const Options& options,
                                  const PlanningRules& rules) const {
  const OpCode op = options.op;
  if (options.root >= 0 || op == OpCode::kBroadcast || op == OpCode::kReduce ||
      op == OpCode::kGather || op == OpCode::kScatter) {
    checkPosition(options.root, opName(op));
  }
  ScheduleRequest request;
  request.op = op;
  request.algorithm = options.algorithm;
  request.group_size = size();
  request.rank = rank_;
  request.count = operands.count;
  request.element_bytes = dtypeBytes(operands.dtype);
  request.root = options.root;
  request.average = options.redop == RedOp::kAvg;
  request.in_counts = operands.in_counts;
  request.out_counts = operands.out_counts;
  request.nodes = nodes_;
  const ScheduleRequest asked = request;
  if (rules.choose && request.algorithm == Algorithm::kAuto) {
    request.algorithm = rules.choose(request);
  }
  const bool reads = rules.peer_reads && hasPeerReader(request);
  auto schedule = reads ? nullptr : world_->schedule(request);
  Call call;
  call.subset_hash = hash_;
  call.count = operands.count;  // 0 when ragged: the pairs' sizes are checked message by message
  call.op = op;
  call.dtype = operands.dtype;
  call.redop = options.redop;
  call.algorithm = reads ? request.algorithm : schedule->algorithm;
  call.root = static_cast<int16_t>(options.root);
  call.group_size = static_cast<uint16_t>(size());
  return {call, asked, std::move(schedule)};
}

CollectiveWork Communicator::makeCollective(Ranks ranks, const Operands& operands,
                                            const Options& options) const {
  const bool ragged = !operands.in_counts.empty();
  const uint64_t epoch = world_->schedules().epoch();
  Call call;
  std::shared_ptr<const Schedule> schedule;
  if (!ragged) {
    const std::lock_guard lock(mutex_);
    const LastPlan& last = last_plan_;
    if (last.schedule != nullptr && last.count == operands.count && last.dtype == operands.dtype &&
        last.options == options && last.epoch == epoch) {
      call = last.call;
      schedule = last.schedule;
    }
  }
  if (schedule == nullptr) {
    CollectivePlan made = plan(operands, options);
    call = made.call;
    schedule = std::move(made.schedule);
    if (!ragged) {
      const std::lock_guard lock(mutex_);
      last_plan_ = {options, operands.count, operands.dtype, epoch, call, schedule};
    }
  }
  return CollectiveWork(call, std::move(ranks), std::move(schedule), operands.in, operands.out);
}

std::shared_ptr<Work> Communicator::startCollective(const Operands& operands,
                                                    const Options& options) const {
  std::shared_ptr<Work> work(new CollectiveWork(makeCollective(ranks_, operands, options)));
  world_->submit(work);
  return work;
}

void Communicator::collective(const Operands& operands, const Options& options, double timeout_s,
                              const InterruptCheck& check_interrupt) const {
  CollectiveWork work = makeCollective(borrow(ranks_), operands, options);
  world_->run(work, timeout_s, check_interrupt);
}

int Communicator::globalRank(int position, const char* what) const {
  checkPosition(position, what);
  return (*ranks_)[static_cast<size_t>(position)];
}

Call Communicator::callOfMessages() const {
  Call call;
  call.subset_hash = hash_;
  call.group_size = static_cast<uint16_t>(size());
  return call;
}

Call Communicator::callOfMessage(const Message& message) const {
  Call call = callOfMessages();
  call.count = message.count;
  call.dtype = message.dtype;
  return call;
}

void Communicator::checkPositions(std::span<const Message> sends,
                                  std::span<const Message> recvs) const {
  for (const Message& message : sends) checkPosition(message.peer, "send");
  for (const Message& message : recvs) checkPosition(message.peer, "recv");
}

std::shared_ptr<Work> Communicator::startExchange(std::span<const Message> sends,
                                                  std::span<const Message> recvs) const {
  checkPositions(sends, recvs);
  std::shared_ptr<Work> work;
  if (sends.size() + recvs.size() == 1) {
    const Message& only = sends.empty() ? recvs[0] : sends[0];
    work = std::make_shared<MessageWork>(callOfMessage(only), ranks_, only, !sends.empty());
  } else {
    work = std::make_shared<ExchangeWork>(callOfMessages(), ranks_, sends, recvs);
  }
  world_->submit(work);
  return work;
}

void Communicator::resync(double timeout_s, const InterruptCheck& check_interrupt,
                          bool quiet) const {
  Call call = callOfMessages();
  call.op = OpCode::kResync;
  world_->resync(call, ranks_, timeout_s, check_interrupt, quiet);
}

void Communicator::exchange(std::span<const Message> sends, std::span<const Message> recvs,
                            double timeout_s, const InterruptCheck& check_interrupt) const {
  checkPositions(sends, recvs);
  if (sends.size() + recvs.size() == 1) {
    const Message& only = sends.empty() ? recvs[0] : sends[0];
    MessageWork work(callOfMessage(only), borrow(ranks_), only, !sends.empty());
    world_->run(work, timeout_s, check_interrupt);
  } else {
    ExchangeWork work(callOfMessages(), borrow(ranks_), sends, recvs);
    world_->run(work, timeout_s, check_interrupt);
  }
}

}  // namespace hdpcomm
