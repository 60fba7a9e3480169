#include "testing/fake_nccl.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "kernels/reduce.hpp"
#include "testing/fake_queue.hpp"
#include "transport/stream/nccl/groups.hpp"

namespace hdpcomm::testing {
namespace {

DType dtypeOfType(int type) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (ncclTypeOf(static_cast<DType>(i)) == type) return static_cast<DType>(i);
  }
  return DType::kUint8;
}

RedOp redOpOf(int op) {
  for (const RedOp each : {RedOp::kSum, RedOp::kProd, RedOp::kMax, RedOp::kMin, RedOp::kAvg}) {
    if (ncclOpOf(each) == op) return each;
  }
  return RedOp::kSum;
}

}  // namespace

FakeNccl::FakeNccl(int num_ranks, int version)
    : ranks_(static_cast<size_t>(num_ranks)), version_(version) {
  if (num_ranks < 1 || num_ranks > 256) {
    throwInvalidUsage("a fake NCCL has 1 to 256 ranks, not " + std::to_string(num_ranks));
  }
  for (int i = 0; i < num_ranks; ++i) {
    ranks_[static_cast<size_t>(i)].owner = this;
    ranks_[static_cast<size_t>(i)].rank = i;
  }
}

DevicePtr FakeNccl::queue(int rank) {
  return std::make_shared<FakeQueue>(shared_from_this(), rank);
}

std::byte* FakeNccl::allocate(int rank, size_t bytes) {
  auto& memory = ranks_[static_cast<size_t>(rank)].memory;
  memory.push_back(std::make_unique<std::byte[]>(bytes));
  std::memset(memory.back().get(), 0xCD, bytes);
  return memory.back().get();
}

void FakeNccl::release(int rank, std::byte* memory, size_t bytes) {
  enqueueLocal(rank, [=] { std::memset(memory, 0xDD, bytes); });
}

void FakeNccl::attach(int rank, DevicePtr device) {
  const auto held = lock();
  ranks_.at(static_cast<size_t>(rank)).device = std::move(device);
}

NcclStream FakeNccl::stream(int rank) { return &ranks_[static_cast<size_t>(rank)]; }

void FakeNccl::label(int rank, const std::string& text) {
  Rank& own = ranks_.at(static_cast<size_t>(rank));
  own.label = text;
  own.order.push_back(text);
}

void FakeNccl::failNext(const std::string& function, int rank, int code) {
  const auto held = lock();
  failures_[{function, rank}] = code;
}

void FakeNccl::setAsyncError(int rank, int code) {
  const auto held = lock();
  ranks_.at(static_cast<size_t>(rank)).async_error = code;
}

int FakeNccl::failureOf(const std::string& function, int rank) {
  for (const int who : {rank, -1}) {
    const auto found = failures_.find({function, who});
    if (found == failures_.end()) continue;
    const int code = found->second;
    failures_.erase(found);
    last_error_ = "planted in " + function;
    return code;
  }
  return kNcclSuccess;
}

int FakeNccl::join(NcclComm* comm, int num_ranks, int rank) {
  if (num_ranks != static_cast<int>(ranks_.size()) || rank < 0 || rank >= num_ranks ||
      ranks_[static_cast<size_t>(rank)].joined) {
    last_error_ = "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks);
    return kNcclInvalidArgument;
  }
  ranks_[static_cast<size_t>(rank)].joined = true;
  ranks_[static_cast<size_t>(rank)].polls_left = 2;
  *comm = reinterpret_cast<NcclComm>(&ranks_[static_cast<size_t>(rank)]);
  return kNcclInProgress;
}

void FakeNccl::enqueueLocal(int rank, std::function<void()> work) {
  Rank& own = ranks_[static_cast<size_t>(rank)];
  Item item;
  item.local = std::move(work);
  own.stream.push_back(std::move(item));
}

int FakeNccl::enqueue(Rank& rank, Transfer transfer) {
  if (transfer.peer < 0 || transfer.peer >= static_cast<int>(ranks_.size())) {
    last_error_ = "peer " + std::to_string(transfer.peer);
    return kNcclInvalidArgument;
  }
  ++rank.group_depth;  // a call outside a group is a group of one
  rank.collecting.push_back(transfer);
  return endGroup(rank);
}

int FakeNccl::enqueueWhole(Rank& rank, Whole whole) {
  Item item;
  item.whole = std::make_shared<Whole>(std::move(whole));
  item.label = rank.label;
  rank.stream.push_back(std::move(item));
  return kNcclSuccess;
}

// NCCL waits for operations in progress, and may hang: a complaint.
void FakeNccl::holdDestroy() {
  const auto held = lock();
  destroy_held_ = true;
}

void FakeNccl::letDestroy() {
  const auto held = lock();
  destroy_held_ = false;
  destroy_let_.notify_all();
}

int FakeNccl::numInDestroy() {
  const auto held = lock();
  return in_destroy_;
}

int FakeNccl::destroyUnheld(Rank& rank) {
  auto held = lock();
  ++in_destroy_;
  destroy_let_.wait(held, [this] { return !destroy_held_; });
  --in_destroy_;
  return destroy(rank);
}

int FakeNccl::destroy(Rank& rank) {
  const bool in_progress = !rank.stream.empty() || rank.polls_left > 0 || stall_init_;
  if (!in_progress && rank.async_error == kNcclSuccess && !rank.aborted) {
    rank.aborted = rank.retired = true;
    return kNcclSuccess;
  }
  complaints_.push_back("rank " + std::to_string(rank.rank) + " called ncclCommDestroy " +
                        (rank.aborted  ? "on a communicator that has ended"
                         : in_progress ? "with operations in progress"
                                       : "after an asynchronous error"));
  last_error_ = complaints_.back();
  return kNcclInvalidUsage;
}

std::vector<std::string> FakeNccl::complaints() {
  const auto held = lock();
  return complaints_;
}

// Ends all operations of the rank, done or not. Its peers keep waiting for theirs.
void FakeNccl::abort(Rank& rank) {
  rank.aborted = true;
  for (auto* posted : {&sends_, &recvs_}) {
    for (auto& [pair, queue] : *posted) {
      std::erase_if(queue, [&](const Posted& each) { return each.rank == &rank; });
    }
  }
  rank.stream.clear();
  for (uint32_t& flag : rank.flags) {
    if (rank.device != nullptr) rank.device->storeFlag(&flag, 1);
  }
  for (Captured& each : rank.captured) rank.device->storeFlag(&each.over, 1);
}

bool FakeNccl::allAtWhole() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return !rank.stream.empty() && rank.stream.front().whole &&
           (rank.device == nullptr || rank.stream.front().arrived);
  });
}

void FakeNccl::finish(Rank& rank) {
  uint32_t* const over = rank.stream.front().over;
  rank.stream.pop_front();
  if (over != nullptr) rank.device->storeFlag(over, 1);
}

int FakeNccl::endGroup(Rank& rank) {
  if (--rank.group_depth > 0 || rank.collecting.empty()) return kNcclSuccess;
  Item item;
  item.group = std::exchange(rank.collecting, {});
  item.label = rank.label;
  const size_t size = item.group.size();
  rank.stream.push_back(std::move(item));
  if (size <= nccl::kMaxGroup) return kNcclSuccess;
  last_error_ = "a group of " + std::to_string(size) + " operations";
  return kNcclInvalidUsage;
}

// Runs local work at the head of the stream, or posts the group there. True: something happened.
bool FakeNccl::start(Rank& rank) {
  if (rank.stream.empty()) return false;
  Item& item = rank.stream.front();
  if (item.local) {
    item.local();
    rank.stream.pop_front();
    return true;
  }
  if (item.whole || item.posted) return false;
  item.posted = true;
  for (Transfer& transfer : item.group) {
    const bool is_send = transfer.isSend();
    const auto pair =
        is_send ? std::pair(rank.rank, transfer.peer) : std::pair(transfer.peer, rank.rank);
    auto& own = (is_send ? sends_ : recvs_)[pair];
    own.push_back({&rank, &item, &transfer});
    if (own.size() == 1 && !(is_send ? recvs_ : sends_)[pair].empty()) {
      ready_.push_back(pair);
    }
  }
  return true;
}

std::string FakeNccl::match(int source, int target) {
  auto& sends = sends_[{source, target}];
  auto& recvs = recvs_[{source, target}];
  if (sends.empty() || recvs.empty()) return "";  // one of them was aborted
  const Posted send = sends.front();
  const Posted recv = recvs.front();
  sends.pop_front();
  recvs.pop_front();
  if (send.transfer->bytes != recv.transfer->bytes || send.item->label != recv.item->label) {
    return who(send) + " sends " + std::to_string(send.transfer->bytes) + " bytes, which " +
           who(recv) + " takes for its " + std::to_string(recv.transfer->bytes) + culprit();
  }
  std::memmove(recv.transfer->data, send.transfer->data, send.transfer->bytes);
  if (!sends.empty() && !recvs.empty()) ready_.push_back({source, target});
  for (const Posted& posted : {send, recv}) posted.transfer->done = true;
  for (const Posted& posted : {send, recv}) {
    auto& stream = posted.rank->stream;
    if (stream.empty() || &stream.front() != posted.item) continue;  // ended by the first of both
    const auto& group = posted.item->group;
    if (std::all_of(group.begin(), group.end(), [](const Transfer& each) { return each.done; })) {
      finish(*posted.rank);
    }
  }
  return "";
}

// The collective at the head of all streams, if there is one.
std::string FakeNccl::runWhole() {
  const auto kept = ranks_[0].stream.front().whole;
  const Whole& first = *kept;
  for (const Rank& rank : ranks_) {
    const Whole& other = *rank.stream.front().whole;
    if (other.op == first.op && other.count == first.count && other.type == first.type &&
        other.redop == first.redop && other.root == first.root) {
      continue;
    }
    return "rank " + std::to_string(rank.rank) + " called " + other.name + "(" +
           std::to_string(other.count) + ") where rank 0 called " + first.name + "(" +
           std::to_string(first.count) + ")" + culprit();
  }
  std::vector<const std::byte*> ins;
  for (const Rank& rank : ranks_) {
    ins.push_back(static_cast<const std::byte*>(rank.stream.front().whole->in));
  }
  const std::vector<std::byte> result = combine(first, ins);
  const size_t bytes = extentOf(first).second;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    auto* out = static_cast<std::byte*>(ranks_[i].stream.front().whole->out);
    const size_t offset = first.op == OpCode::kReduceScatter ? i * bytes : 0;
    if (bytes > 0) std::memcpy(out, result.data() + offset, bytes);
    finish(ranks_[i]);
  }
  return "";
}

// Bytes of a rank's input and output.
std::pair<size_t, size_t> FakeNccl::extentOf(const Whole& whole) const {
  const size_t bytes = whole.count * dtypeBytes(dtypeOfType(whole.type));
  return {whole.op == OpCode::kReduceScatter ? bytes * ranks_.size() : bytes,
          whole.op == OpCode::kAllGather ? bytes * ranks_.size() : bytes};
}

// Combines the inputs of all ranks: the whole result, of which a rank may get one part only.
std::vector<std::byte> FakeNccl::combine(const Whole& whole,
                                         const std::vector<const std::byte*>& ins) const {
  const DType dtype = dtypeOfType(whole.type);
  const size_t bytes = extentOf(whole).first;
  const bool gathers = whole.op == OpCode::kAllGather;
  const bool reduces = whole.op == OpCode::kAllReduce || whole.op == OpCode::kReduceScatter;
  std::vector<std::byte> result(gathers ? bytes * ins.size() : bytes);
  if (bytes == 0) return result;  // the addresses may be null
  for (size_t i = 0; i < ins.size(); ++i) {
    if (gathers) {
      std::memcpy(result.data() + i * bytes, ins[i], bytes);
    } else if (reduces && i > 0) {
      reduceFunction(dtype, redOpOf(whole.redop))(result.data(), result.data(), ins[i],
                                                  bytes / dtypeBytes(dtype));
    } else if (reduces || static_cast<int>(i) == whole.root) {
      std::memcpy(result.data(), ins[i], bytes);
    }
  }
  if (reduces && redOpOf(whole.redop) == RedOp::kAvg) {
    divideFunction(dtype)(result.data(), bytes / dtypeBytes(dtype),
                          static_cast<double>(ins.size()));
  }
  return result;
}

std::string FakeNccl::run(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<size_t> order(ranks_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (;;) {
    bool moved = false;
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) {
      if (random() % 3 != 0) moved |= start(ranks_[i]);
    }
    if (!ready_.empty()) {
      const size_t pick = random() % ready_.size();
      const auto pair = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      if (std::string wrong = match(pair.first, pair.second); !wrong.empty()) return wrong;
      continue;
    }
    if (moved) continue;
    for (Rank& rank : ranks_) moved |= start(rank);
    if (moved) continue;
    if (allAtWhole()) {
      if (std::string wrong = runWhole(); !wrong.empty()) return wrong;
      continue;
    }
    const bool over = std::all_of(ranks_.begin(), ranks_.end(),
                                  [](const Rank& rank) { return rank.stream.empty(); });
    return over ? "" : stuck();
  }
}

}  // namespace hdpcomm::testing
