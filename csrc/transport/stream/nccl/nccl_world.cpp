#include "transport/stream/nccl/nccl_world.hpp"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <system_error>
#include <thread>

#include "base/error.hpp"

namespace hdpcomm {
namespace {

constexpr int kP2pChannels = 32;  // at most, of a pair

constexpr int kYields = 200;  // polls of a call in progress, before sleeping between polls
constexpr auto kCheckInterval = std::chrono::milliseconds(1);

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

NcclWorld::NcclWorld(std::shared_ptr<const NcclApi> api, const NcclUniqueId& id, int rank, int size,
                     double timeout_s, std::vector<int> node_of_rank, const WaitCheck& check)
    : api_(std::move(api)),
      rank_(rank),
      size_(size),
      node_of_rank_(std::move(node_of_rank)),
      timeout_s_(timeout_s),
      connected_(static_cast<size_t>(size)) {
  if (node_of_rank_.empty()) node_of_rank_.resize(static_cast<size_t>(size), 0);
  NcclConfig config;
  try {
    await(api_->commInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig",
          check);
  } catch (...) {
    abort();
    throw;
  }
}

// Whoever has not retired the world does not know that the other ranks are through as well.
NcclWorld::~NcclWorld() { abort(); }

void NcclWorld::checkResult(int result, const char* call) {
  ncclCheck(*api_, result, call, comm_, rank_);
}

// The communicator is not blocking: a call may go on after it has returned, and until it has ended
// nothing else may be called, and what it enqueues may not be on its stream.
void NcclWorld::await(int result, const char* call, const WaitCheck& check) {
  const auto start = std::chrono::steady_clock::now();
  auto next_check = start + kCheckInterval;
  for (int polls = 0; result == kNcclInProgress && comm_ != nullptr; ++polls) {
    const int asked = api_->commGetAsyncError(comm_, &result);
    if (asked != kNcclSuccess) result = asked;
    if (result != kNcclInProgress) break;
    const auto now = std::chrono::steady_clock::now();
    if (check && now >= next_check) {
      check();
      next_check = now + kCheckInterval;
    }
    const std::chrono::duration<double> waited = now - start;
    if (waited.count() > timeout_s_) {
      throw Error(ErrorKind::kTimeout,
                  "rank " + std::to_string(rank_) + " waited " + std::to_string(timeout_s_) +
                      " s in " + call + " of a communicator of " + std::to_string(size_) +
                      " ranks: look for a rank that did not call it, or raise timeout=",
                  {.rank = rank_, .peer = -1, .op = {}, .ranks = {}, .seq = -1});
    }
    polls < kYields ? std::this_thread::yield()
                    : std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  checkResult(result, call);
}

void NcclWorld::checkUsable() const {
  if (comm_ != nullptr) return;
  throw Error(ErrorKind::kAborted, "NCCL's communicator was aborted: make a new one with init()",
              {.rank = rank_, .peer = -1, .op = {}, .ranks = {}, .seq = -1});
}

void NcclWorld::checkAsync() {
  checkUsable();
  int state = kNcclSuccess;
  checkResult(api_->commGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
  checkResult(state, "an operation of NCCL");
}

// The call returns when the last graph has gone, which the program may keep for ever.
void NcclWorld::destroyWithGraphs() noexcept {
  constexpr auto kGrace = std::chrono::milliseconds(500);
  try {
    auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    std::thread destroys([api = api_, comm = comm_, ended] {
      api->commDestroy(comm);
      ended->set_value();
    });
    end.wait_for(kGrace) == std::future_status::ready ? destroys.join() : destroys.detach();
  } catch (const std::system_error&) {  // no thread: the communicator stays until the process ends
  }
}

void NcclWorld::retire() noexcept {
  if (comm_ != nullptr && in_graphs_) {
    destroyWithGraphs();
  } else if (comm_ != nullptr) {
    api_->commDestroy(comm_);
  }
  comm_ = nullptr;
}

void NcclWorld::abort() noexcept {
  if (comm_ != nullptr) api_->commAbort(comm_);
  comm_ = nullptr;
}

bool NcclWorld::isRemote(int peer) const {
  return node_of_rank_[static_cast<size_t>(peer)] != node_of_rank_[static_cast<size_t>(rank_)];
}

void NcclWorld::countSent(size_t bytes, int peer) {
  connected_[static_cast<size_t>(peer)] = true;
  counts_.messages.countSent(bytes);
  if (isRemote(peer)) counts_.messages.remote_bytes_sent += bytes;
}

void NcclWorld::countReceived(size_t bytes, int peer) {
  connected_[static_cast<size_t>(peer)] = true;
  counts_.messages.countReceived(bytes);
  if (isRemote(peer)) counts_.messages.remote_bytes_received += bytes;
}

void NcclWorld::send(const void* data, size_t bytes, int peer, NcclStream stream) {
  countSent(bytes, peer);
  checkResult(api_->send(data, bytes, kByteType, peer, comm_, stream), "ncclSend");
}

void NcclWorld::recv(void* data, size_t bytes, int peer, NcclStream stream) {
  countReceived(bytes, peer);
  checkResult(api_->recv(data, bytes, kByteType, peer, comm_, stream), "ncclRecv");
}

// Ends the group in any case: NCCL counts how deep it is.
void NcclWorld::group(const WaitCheck& check, const std::function<void()>& calls) {
  checkResult(api_->groupStart(), "ncclGroupStart");
  try {
    calls();
  } catch (...) {
    api_->groupEnd();
    throw;
  }
  ++counts_.groups;
  await(api_->groupEnd(), "ncclGroupEnd", check);
}

std::vector<bool> NcclWorld::leftOutOf(const std::vector<int>& ranks) const {
  std::vector<bool> result;
  if (left_out_.empty()) return result;
  for (const int rank : ranks) result.push_back(leavesOut(rank));
  return result;
}

void NcclWorld::connectAhead(int max_distance, std::byte* bytes, NcclStream stream,
                             const WaitCheck& check) {
  checkUsable();
  const int last = std::min(max_distance, size_ / 2);
  for (int distance = 1; distance <= last; ++distance) {
    // Both directions of a pair: the ring forwards, then backwards.
    for (const int step : {distance, size_ - distance}) {
      const int to = (rank_ + step) % size_;
      const int from = (rank_ - step + size_) % size_;
      if (leavesOut(to) && leavesOut(from)) continue;
      group(check, [&] {
        if (!leavesOut(to)) send(bytes, 1, to, stream);
        if (!leavesOut(from)) recv(bytes + 1, 1, from, stream);
      });
    }
  }
}

void NcclWorld::checkConnected(int peer) const {
  if (peer == rank_ || connected_[static_cast<size_t>(peer)]) return;
  throwInvalidUsage("an operation that is captured into a graph has a message with rank " +
                    std::to_string(peer) +
                    ", with which NCCL is not connected yet, and it cannot connect during the "
                    "capture: run the same operation once, and Communicator.synchronize(), "
                    "before it");
}

void NcclWorld::checkConnected(OpCode whole) const {
  if (std::find(whole_used_.begin(), whole_used_.end(), whole) != whole_used_.end()) return;
  throwInvalidUsage(std::string("the first ") + opName(whole) +
                    " by NCCL itself cannot be captured into a graph, since NCCL may have to "
                    "connect for it: run the same operation once, and "
                    "Communicator.synchronize(), before it");
}

void NcclWorld::checkExchange(size_t sends, size_t recvs) {
  if (sends + recvs <= kMaxExchange) return;
  throwInvalidUsage("exchange() got " + std::to_string(sends) + " sends and " +
                    std::to_string(recvs) + " receives; NCCL takes " +
                    std::to_string(kMaxExchange) + " of a group: make several exchanges");
}

void NcclWorld::exchange(const Messages& sends, const Messages& recvs, NcclStream stream,
                         const WaitCheck& check) {
  checkUsable();
  checkExchange(sends.size(), recvs.size());
  group(check, [&] {
    for (const Message& each : sends) send(each.data, each.bytes, each.peer, stream);
    for (const Message& each : recvs) recv(each.data, each.bytes, each.peer, stream);
  });
}

bool NcclWorld::hasWhole(OpCode op, DType dtype, const std::vector<int>& ranks) const {
  return (op == OpCode::kAllReduce || op == OpCode::kAllGather || op == OpCode::kReduceScatter ||
          op == OpCode::kBroadcast) &&
         ncclTypeOf(dtype) >= 0 && size_ > 1 && isWholeWorld(ranks, size_);
}

void NcclWorld::runWhole(const Whole& operation, NcclStream stream, const WaitCheck& check) {
  checkUsable();
  const auto& [op, in, out, count, dtype, redop, root] = operation;
  const int type = ncclTypeOf(dtype);
  const int reduction = ncclOpOf(redop);
  ++counts_.whole_world_ops;
  if (std::find(whole_used_.begin(), whole_used_.end(), op) == whole_used_.end()) {
    whole_used_.push_back(op);
  }
  switch (op) {
    case OpCode::kAllReduce:
      return await(api_->allReduce(in, out, count, type, reduction, comm_, stream), "ncclAllReduce",
                   check);
    case OpCode::kAllGather:
      return await(api_->allGather(in, out, count, type, comm_, stream), "ncclAllGather", check);
    case OpCode::kReduceScatter:
      return await(api_->reduceScatter(in, out, count, type, reduction, comm_, stream),
                   "ncclReduceScatter", check);
    default:
      return await(api_->broadcast(in, out, count, type, root, comm_, stream), "ncclBroadcast",
                   check);
  }
}

Stats NcclWorld::stats() const {
  int local = 0;
  size_t peers = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || !connected_[static_cast<size_t>(peer)]) continue;
    ++peers;
    local += isRemote(peer) ? 0 : 1;
  }
  Stats stats = counts_.messages.named(peers);
  stats["nccl_groups"] = counts_.groups;
  stats["nccl_whole_world_ops"] = counts_.whole_world_ops;
  stats["predicted_buffer_bytes"] = ncclBufferBytes(local, kP2pChannels);
  return stats;
}

}  // namespace hdpcomm
