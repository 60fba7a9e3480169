#include "transport/stream/nccl/nccl_world.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>
#include <tuple>

#include "base/error.hpp"
#include "transport/stream/nccl/groups.hpp"

namespace hdpcomm {
namespace {

constexpr int kByteType = 1;      // ncclUint8: messages are bytes
constexpr int kP2pChannels = 32;  // at most, of a pair

constexpr int kYields = 200;  // looks at a call in progress before sleeping between them
constexpr auto kLookAgain = std::chrono::milliseconds(1);  // around, meanwhile
constexpr size_t kMaxPrepared = 256;                       // schedules

size_t padded(size_t bytes) { return (bytes + 511) / 512 * 512; }

std::byte* at(const NcclWorld::Operation& operation, std::byte* scratch, const Span& span) {
  switch (span.buffer) {
    case Buffer::kIn:
      return static_cast<std::byte*>(const_cast<void*>(operation.in)) + span.offset;
    case Buffer::kOut:
      return static_cast<std::byte*>(operation.out) + span.offset;
    default:
      return scratch + span.offset;
  }
}

size_t arrivalBytes(const std::vector<nccl::Group>& groups) {
  size_t most = 0;
  for (const nccl::Group& group : groups) {
    size_t bytes = 0;
    for (const Recv& recv : group.recvs) {
      if (recv.reduce) bytes += padded(recv.to.bytes);
    }
    most = std::max(most, bytes);
  }
  return most;
}

bool isWholeWorld(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) != size) return false;
  for (int i = 0; i < size; ++i) {
    if (ranks[static_cast<size_t>(i)] != i) return false;
  }
  return true;
}

}  // namespace

uint64_t ncclBufferBytes(int local_peers, int channels) {
  return static_cast<uint64_t>(local_peers) * static_cast<uint64_t>(channels) *
         (10'485'760 + 2'097'152);
}

NcclWorld::NcclWorld(std::shared_ptr<const NcclApi> api, std::shared_ptr<NcclDevice> device,
                     const NcclUniqueId& id, int rank, int size, double timeout_s,
                     std::vector<int> node_of_rank, const Look& look)
    : api_(std::move(api)),
      device_(std::move(device)),
      rank_(rank),
      size_(size),
      node_of_rank_(std::move(node_of_rank)),
      timeout_s_(timeout_s),
      used_(static_cast<size_t>(size)),
      connected_(static_cast<size_t>(size)) {
  if (node_of_rank_.empty()) node_of_rank_.resize(static_cast<size_t>(size), 0);
  NcclConfig config;
  try {
    settle(api_->commInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig",
           look);
  } catch (...) {
    abort();
    throw;
  }
}

// Whoever has not retired the world does not know that the other ranks are through as well.
NcclWorld::~NcclWorld() {
  abort();
  freeWindow();
}

void NcclWorld::check(int result, const char* call) {
  ncclCheck(*api_, result, call, comm_, rank_);
}

// The communicator is not blocking: a call may go on after it has returned, and until it has ended
// nothing else may be called, and what it enqueues may not be on its stream.
void NcclWorld::settle(int result, const char* call, const Look& look) {
  const auto start = std::chrono::steady_clock::now();
  auto next_look = start + kLookAgain;
  for (int looks = 0; result == kNcclInProgress && comm_ != nullptr; ++looks) {
    const int asked = api_->commGetAsyncError(comm_, &result);
    if (asked != kNcclSuccess) result = asked;
    if (result != kNcclInProgress) break;
    const auto now = std::chrono::steady_clock::now();
    if (look && now >= next_look) {
      look();
      next_look = now + kLookAgain;
    }
    const std::chrono::duration<double> waited = now - start;
    if (waited.count() > timeout_s_) {
      throw Error(ErrorKind::kTimeout,
                  "rank " + std::to_string(rank_) + " waited " + std::to_string(timeout_s_) +
                      " s in " + call + " of a communicator of " + std::to_string(size_) +
                      " ranks: look for a rank that did not call it, or raise timeout=",
                  {.rank = rank_, .peer = -1, .op = {}, .ranks = {}, .seq = -1});
    }
    looks < kYields ? std::this_thread::yield()
                    : std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  check(result, call);
}

void NcclWorld::checkUsable() const {
  if (comm_ != nullptr) return;
  throw Error(ErrorKind::kAborted, "NCCL's communicator was aborted: make a new one with init()",
              {.rank = rank_, .peer = -1, .op = {}, .ranks = {}, .seq = -1});
}

void NcclWorld::checkAsync() {
  checkUsable();
  int state = kNcclSuccess;
  check(api_->commGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
  check(state, "an operation of NCCL");
}

void NcclWorld::retire() noexcept {
  try {
    closeWindow();
  } catch (const Error&) {  // then the communicator says so, too, or it frees the window
  }
  if (comm_ != nullptr) api_->commDestroy(comm_);
  comm_ = nullptr;
  freeWindow();
}

// The window's memory stays until the world goes: a program's tensors lie in it.
void NcclWorld::abort() noexcept {
  if (comm_ != nullptr) api_->commAbort(comm_);
  comm_ = nullptr;
}

bool NcclWorld::isRemote(int peer) const {
  return node_of_rank_[static_cast<size_t>(peer)] != node_of_rank_[static_cast<size_t>(rank_)];
}

void NcclWorld::use(int peer) {
  if (peer != rank_) used_[static_cast<size_t>(peer)] = true;
}

void NcclWorld::countSent(size_t bytes, int peer) {
  use(peer);
  ++stats_.messages_sent;
  stats_.bytes_sent += bytes;
  if (isRemote(peer)) stats_.remote_bytes_sent += bytes;
}

void NcclWorld::countReceived(size_t bytes, int peer) {
  use(peer);
  ++stats_.messages_received;
  stats_.bytes_received += bytes;
  if (isRemote(peer)) stats_.remote_bytes_received += bytes;
}

void NcclWorld::send(const void* data, size_t bytes, int peer, NcclStream stream) {
  countSent(bytes, peer);
  connected_[static_cast<size_t>(peer)] = true;
  check(api_->send(data, bytes, kByteType, peer, comm_, stream), "ncclSend");
}

void NcclWorld::recv(void* data, size_t bytes, int peer, NcclStream stream) {
  countReceived(bytes, peer);
  connected_[static_cast<size_t>(peer)] = true;
  check(api_->recv(data, bytes, kByteType, peer, comm_, stream), "ncclRecv");
}

// Ends the group in any case: NCCL counts how deep it is.
void NcclWorld::group(const Look& look, const std::function<void()>& calls) {
  check(api_->groupStart(), "ncclGroupStart");
  try {
    calls();
  } catch (...) {
    api_->groupEnd();
    throw;
  }
  ++stats_.groups;
  settle(api_->groupEnd(), "ncclGroupEnd", look);
}

void NcclWorld::connectAhead(int max_distance, NcclStream stream, const Look& look) {
  checkUsable();
  auto* bytes = static_cast<std::byte*>(device_->allocate(2, stream));
  device_->clear(bytes, 2, stream);
  const int last = std::min(max_distance, size_ / 2);
  for (int distance = 1; distance <= last; ++distance) {
    // Both directions of a pair: the ring forwards, then backwards.
    for (const int step : {distance, size_ - distance}) {
      const int to = (rank_ + step) % size_;
      const int from = (rank_ - step + size_) % size_;
      if (leavesOut(to) && leavesOut(from)) continue;
      group(look, [&] {
        if (!leavesOut(to)) send(bytes, 1, to, stream);
        if (!leavesOut(from)) recv(bytes + 1, 1, from, stream);
      });
    }
  }
  device_->release(bytes, stream);
}

void NcclWorld::checkExchange(size_t sends, size_t recvs) {
  if (sends + recvs <= nccl::kMaxGroup) return;
  throwInvalidUsage("exchange() got " + std::to_string(sends) + " sends and " +
                    std::to_string(recvs) + " receives; NCCL takes " +
                    std::to_string(nccl::kMaxGroup) + " of a group: make several exchanges");
}

void NcclWorld::exchange(const std::vector<Message>& sends, const std::vector<Message>& recvs,
                         NcclStream stream, const Look& look) {
  checkUsable();
  checkExchange(sends.size(), recvs.size());
  const auto isPut = [](const Message& message) { return message.place != kNoPlace; };
  std::vector<Message> puts;
  std::vector<Message> landings;
  std::copy_if(sends.begin(), sends.end(), std::back_inserter(puts), isPut);
  std::copy_if(recvs.begin(), recvs.end(), std::back_inserter(landings), isPut);
  put(puts, landings, stream, look);
  if (sends.size() > puts.size() || recvs.size() > landings.size()) {
    group(look, [&] {
      for (const Message& each : sends) {
        if (!isPut(each)) send(each.data, each.bytes, each.peer, stream);
      }
      for (const Message& each : recvs) {
        if (!isPut(each)) recv(each.data, each.bytes, each.peer, stream);
      }
    });
  }
  awaitSignals(landings, stream, look);
}

void NcclWorld::checkConnected(int peer) const {
  if (isConnected(peer)) return;
  throwInvalidUsage("an operation that is captured into a graph has a message with rank " +
                    std::to_string(peer) +
                    ", with which NCCL is not connected yet, and it cannot connect during the "
                    "capture: run the same operation once, and Communicator.synchronize(), "
                    "before it");
}

void NcclWorld::checkConnected(const Operation& operation) {
  if (isWhole(operation)) {
    const OpCode op = operation.request.op;
    if (std::find(whole_used_.begin(), whole_used_.end(), op) != whole_used_.end()) return;
    throwInvalidUsage(std::string("the first ") + opName(op) +
                      " by NCCL itself cannot be captured into a graph, since NCCL may have to "
                      "connect for it: run the same operation once, and "
                      "Communicator.synchronize(), before it");
  }
  for (const nccl::Group& group : prepare(operation)->groups) {
    for (const Send& send : group.sends) {
      checkConnected(operation.ranks[static_cast<size_t>(send.peer)]);
    }
    for (const Recv& recv : group.recvs) {
      checkConnected(operation.ranks[static_cast<size_t>(recv.peer)]);
    }
  }
}

size_t NcclWorld::scratchBytes(const Operation& operation) {
  return isWhole(operation) ? 0 : prepare(operation)->scratchBytes();
}

void NcclWorld::collective(const Operation& operation, NcclStream stream, const Look& look) {
  checkUsable();
  isWhole(operation) ? runWhole(operation, stream, look) : runSchedule(operation, stream, look);
}

bool NcclWorld::isWhole(const Operation& operation) const {
  const OpCode op = operation.request.op;
  return (op == OpCode::kAllReduce || op == OpCode::kAllGather || op == OpCode::kReduceScatter ||
          op == OpCode::kBroadcast) &&
         operation.request.algorithm == Algorithm::kAuto && ncclTypeOf(operation.dtype) >= 0 &&
         size_ > 1 && isWholeWorld(operation.ranks, size_);
}

void NcclWorld::runWhole(const Operation& operation, NcclStream stream, const Look& look) {
  const ScheduleRequest& request = operation.request;
  const auto& [in, out, count] = std::tie(operation.in, operation.out, request.count);
  const int type = ncclTypeOf(operation.dtype);
  const int op = ncclOpOf(operation.redop);
  ++stats_.whole_world_ops;
  if (std::find(whole_used_.begin(), whole_used_.end(), request.op) == whole_used_.end()) {
    whole_used_.push_back(request.op);
  }
  switch (request.op) {
    case OpCode::kAllReduce:
      return settle(api_->allReduce(in, out, count, type, op, comm_, stream), "ncclAllReduce",
                    look);
    case OpCode::kAllGather:
      return settle(api_->allGather(in, out, count, type, comm_, stream), "ncclAllGather", look);
    case OpCode::kReduceScatter:
      return settle(api_->reduceScatter(in, out, count, type, op, comm_, stream),
                    "ncclReduceScatter", look);
    default:
      return settle(api_->broadcast(in, out, count, type, request.root, comm_, stream),
                    "ncclBroadcast", look);
  }
}

std::vector<bool> NcclWorld::elsewhere(const std::vector<int>& ranks) const {
  std::vector<bool> result;
  if (left_out_.empty()) return result;
  for (const int rank : ranks) result.push_back(leavesOut(rank));
  return result;
}

std::shared_ptr<const NcclWorld::Prepared> NcclWorld::prepare(const Operation& operation) {
  const PreparedKey key(operation.schedule.get(), elsewhere(operation.ranks));
  const auto known = prepared_.find(key);
  if (operation.schedule != nullptr && known != prepared_.end()) return known->second;
  ScheduleRequest request = operation.request;
  const auto own = std::find(operation.ranks.begin(), operation.ranks.end(), rank_);
  if (own == operation.ranks.end()) {
    throwInvalidUsage("rank " + std::to_string(rank_) + " is not among the ranks of its operation");
  }
  request.group_size = static_cast<int>(operation.ranks.size());
  request.rank = static_cast<int>(own - operation.ranks.begin());
  request.element_bytes = dtypeBytes(operation.dtype);
  auto made = std::make_shared<Prepared>();
  made->schedule = operation.schedule != nullptr
                       ? operation.schedule
                       : std::make_shared<const Schedule>(makeSchedule(request));
  made->groups = nccl::groupsOf(request, *made->schedule, key.second);
  made->temp_bytes = padded(made->schedule->temp_bytes);
  made->arrival_bytes = arrivalBytes(made->groups);
  if (operation.schedule == nullptr) return made;
  if (prepared_.size() >= kMaxPrepared) prepared_.clear();
  prepared_.emplace(key, made);
  return made;
}

void NcclWorld::runMoves(const std::vector<Move>& moves, const Operation& operation,
                         std::byte* scratch, NcclStream stream) {
  const DType dtype = operation.dtype;
  for (const Move& move : moves) {
    if (move.to.bytes == 0) continue;
    const size_t count = move.to.bytes / dtypeBytes(dtype);
    std::byte* to = at(operation, scratch, move.to);
    const std::byte* from = at(operation, scratch, move.from);
    if (move.kind == MoveKind::kReduce) {
      device_->reduce(to, to, from, count, dtype, operation.redop, stream);
    } else if (move.kind == MoveKind::kScale) {
      device_->scale(to, count, dtype, static_cast<double>(operation.ranks.size()), stream);
    } else if (to != from) {
      device_->copy(to, from, move.to.bytes, stream);
    }
  }
}

// One step: what is to be reduced arrives in the scratch memory first.
void NcclWorld::runGroup(const nccl::Group& group, const Operation& operation,
                         const Prepared& prepared, std::byte* scratch, NcclStream stream,
                         const Look& look) {
  std::byte* const arrivals = scratch + prepared.temp_bytes;
  // A barrier's messages are empty, and NCCL would send nothing: a byte instead.
  std::byte* const token = tokensOf(prepared, scratch);
  const bool empty_counts = operation.request.op == OpCode::kBarrier;
  const auto peerOf = [&](int peer) { return operation.ranks[static_cast<size_t>(peer)]; };
  this->group(look, [&] {
    std::byte* arrival = arrivals;
    for (const Recv& recv : group.recvs) {
      if (empty_counts) this->recv(token + 1, 1, peerOf(recv.peer), stream);
      if (recv.to.bytes == 0) continue;
      this->recv(recv.reduce ? arrival : at(operation, scratch, recv.to), recv.to.bytes,
                 peerOf(recv.peer), stream);
      if (recv.reduce) arrival += padded(recv.to.bytes);
    }
    for (const Send& send : group.sends) {
      if (empty_counts) this->send(token, 1, peerOf(send.peer), stream);
      if (send.from.bytes == 0) continue;
      this->send(at(operation, scratch, send.from), send.from.bytes, peerOf(send.peer), stream);
    }
  });
  const std::byte* arrival = arrivals;
  for (const Recv& recv : group.recvs) {
    if (!recv.reduce || recv.to.bytes == 0) continue;
    device_->reduce(at(operation, scratch, recv.to), at(operation, scratch, recv.operand), arrival,
                    recv.to.bytes / dtypeBytes(operation.dtype), operation.dtype, operation.redop,
                    stream);
    arrival += padded(recv.to.bytes);
  }
}

void NcclWorld::runSchedule(const Operation& operation, NcclStream stream, const Look& look) {
  const std::shared_ptr<const Prepared> prepared = prepare(operation);
  auto* scratch = static_cast<std::byte*>(device_->allocate(prepared->scratchBytes(), stream));
  if (operation.request.op == OpCode::kBarrier)
    device_->clear(tokensOf(*prepared, scratch), 2, stream);
  const std::vector<Step>& steps = prepared->schedule->steps;
  for (const nccl::Group& group : prepared->groups) {
    runMoves(group.moves, operation, scratch, stream);
    const bool with_others = operation.beside != nullptr && group.step < steps.size();
    if (with_others && group.first) operation.beside->begin(steps[group.step], scratch);
    if (!group.sends.empty() || !group.recvs.empty()) {
      runGroup(group, operation, *prepared, scratch, stream, look);
    }
    if (with_others && group.last) operation.beside->end();
  }
  if (operation.beside != nullptr) operation.beside->finish();
  device_->release(scratch, stream);
}

NcclStats NcclWorld::stats() const {
  NcclStats stats = stats_;
  int local = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (used_[static_cast<size_t>(peer)]) ++stats.peers;
    if (peer != rank_ && connected_[static_cast<size_t>(peer)] && !isRemote(peer)) ++local;
  }
  stats.buffer_bytes = ncclBufferBytes(local, kP2pChannels);
  return stats;
}

}  // namespace hdpcomm
