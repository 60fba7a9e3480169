#include "hdpcomm/transport/nccl_world.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "groups.hpp"
#include "hdpcomm/base/error.hpp"

namespace hdpcomm {
namespace {

constexpr int kByteType = 1;      // ncclUint8: messages are bytes
constexpr int kP2pChannels = 32;  // at most, of a pair

// Spans of one operation to addresses; the temporary and the room for what is to be reduced live in
// the stream.
struct Buffers {
  std::byte* base[3];
  std::byte* at(const Span& span) const {
    return base[static_cast<size_t>(span.buffer)] + span.offset;
  }
};

size_t arrivalBytes(const std::vector<nccl::Group>& groups) {
  size_t most = 0;
  for (const nccl::Group& group : groups) {
    size_t bytes = 0;
    for (const Recv& recv : group.recvs) {
      if (recv.reduce) bytes += (recv.to.bytes + 511) / 512 * 512;
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
                     std::vector<int> node_of_rank)
    : api_(std::move(api)),
      device_(std::move(device)),
      rank_(rank),
      size_(size),
      node_of_rank_(std::move(node_of_rank)),
      used_(static_cast<size_t>(size)) {
  if (node_of_rank_.empty()) node_of_rank_.resize(static_cast<size_t>(size), 0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  NcclConfig config;
  int state = api_->commInitRankConfig(&comm_, size, id, rank, &config);
  while (state == kNcclInProgress && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const int asked = api_->commGetAsyncError(comm_, &state);
    if (asked != kNcclSuccess) state = asked;
  }
  if (state == kNcclSuccess) return;
  try {
    if (state == kNcclInProgress) {
      throw Error(ErrorKind::kTimeout,
                  "rank " + std::to_string(rank) + " waited " + std::to_string(timeout_s) +
                      " s for NCCL's communicator of " + std::to_string(size) +
                      " ranks: look for ranks that did not come, or raise timeout=",
                  {.rank = rank, .peer = -1, .op = "init", .ranks = {}, .seq = -1});
    }
    check(state, "ncclCommInitRankConfig");
  } catch (const Error&) {
    abort();
    throw;
  }
}

NcclWorld::~NcclWorld() {
  if (comm_ != nullptr) api_->commDestroy(comm_);
}

void NcclWorld::check(int result, const char* call) {
  ncclCheck(*api_, result, call, comm_, rank_);
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

void NcclWorld::abort() noexcept {
  if (comm_ != nullptr) api_->commAbort(comm_);
  comm_ = nullptr;
}

void NcclWorld::use(int peer) {
  if (peer != rank_) used_[static_cast<size_t>(peer)] = true;
}

void NcclWorld::send(const void* data, size_t bytes, int peer, NcclStream stream) {
  use(peer);
  ++stats_.messages_sent;
  stats_.bytes_sent += bytes;
  check(api_->send(data, bytes, kByteType, peer, comm_, stream), "ncclSend");
}

void NcclWorld::recv(void* data, size_t bytes, int peer, NcclStream stream) {
  use(peer);
  check(api_->recv(data, bytes, kByteType, peer, comm_, stream), "ncclRecv");
}

// Ends the group in any case: NCCL counts how deep it is.
void NcclWorld::group(const std::function<void()>& calls) {
  check(api_->groupStart(), "ncclGroupStart");
  try {
    calls();
  } catch (...) {
    api_->groupEnd();
    throw;
  }
  ++stats_.groups;
  check(api_->groupEnd(), "ncclGroupEnd");
}

void NcclWorld::connectAhead(int max_distance, NcclStream stream) {
  checkUsable();
  auto* bytes = static_cast<std::byte*>(device_->allocate(2, stream));
  const int last = std::min(max_distance, size_ / 2);
  for (int distance = 1; distance <= last; ++distance) {
    // Both directions of a pair: the ring forwards, then backwards.
    for (const int step : {distance, size_ - distance}) {
      group([&] {
        send(bytes, 1, (rank_ + step) % size_, stream);
        recv(bytes + 1, 1, (rank_ - step + size_) % size_, stream);
      });
    }
  }
  device_->release(bytes, stream);
}

void NcclWorld::exchange(const std::vector<Message>& sends, const std::vector<Message>& recvs,
                         NcclStream stream) {
  checkUsable();
  if (sends.size() + recvs.size() > nccl::kMaxGroup) {
    throwInvalidUsage("exchange() got " + std::to_string(sends.size()) + " sends and " +
                      std::to_string(recvs.size()) + " receives; NCCL takes " +
                      std::to_string(nccl::kMaxGroup) + " of a group: make several exchanges");
  }
  group([&] {
    for (const Message& message : sends) send(message.data, message.bytes, message.peer, stream);
    for (const Message& message : recvs) recv(message.data, message.bytes, message.peer, stream);
  });
}

void NcclWorld::collective(const Operation& operation, NcclStream stream) {
  checkUsable();
  if (!runWhole(operation, stream)) runSchedule(operation, stream);
}

bool NcclWorld::runWhole(const Operation& operation, NcclStream stream) {
  const ScheduleRequest& request = operation.request;
  const int type = ncclTypeOf(operation.dtype);
  if (request.algorithm != Algorithm::kAuto || type < 0 || !isWholeWorld(operation.ranks, size_) ||
      size_ == 1) {
    return false;
  }
  const int op = ncclOpOf(operation.redop);
  switch (request.op) {
    case OpCode::kAllReduce:
      check(api_->allReduce(operation.in, operation.out, request.count, type, op, comm_, stream),
            "ncclAllReduce");
      break;
    case OpCode::kAllGather:
      check(api_->allGather(operation.in, operation.out, request.count, type, comm_, stream),
            "ncclAllGather");
      break;
    case OpCode::kReduceScatter:
      check(
          api_->reduceScatter(operation.in, operation.out, request.count, type, op, comm_, stream),
          "ncclReduceScatter");
      break;
    case OpCode::kBroadcast:
      check(api_->broadcast(operation.in, operation.out, request.count, type, request.root, comm_,
                            stream),
            "ncclBroadcast");
      break;
    default:
      return false;
  }
  ++stats_.whole_world_ops;
  return true;
}

void NcclWorld::runSchedule(const Operation& operation, NcclStream stream) {
  ScheduleRequest request = operation.request;
  const auto own = std::find(operation.ranks.begin(), operation.ranks.end(), rank_);
  if (own == operation.ranks.end()) {
    throwInvalidUsage("rank " + std::to_string(rank_) + " is not among the ranks of its operation");
  }
  request.group_size = static_cast<int>(operation.ranks.size());
  request.rank = static_cast<int>(own - operation.ranks.begin());
  request.element_bytes = dtypeBytes(operation.dtype);
  const Schedule schedule = makeSchedule(request);
  const std::vector<nccl::Group> groups = nccl::groupsOf(request, schedule);
  const size_t arrivals = arrivalBytes(groups);
  // One byte more: what a barrier sends, whose messages are empty (NCCL would send nothing).
  const size_t temp = (schedule.temp_bytes + 511) / 512 * 512;
  auto* scratch = static_cast<std::byte*>(device_->allocate(temp + arrivals + 2, stream));
  std::byte* const token = scratch + temp + arrivals;
  const bool empty_counts = request.op == OpCode::kBarrier;
  const Buffers buffers{{static_cast<std::byte*>(const_cast<void*>(operation.in)),
                         static_cast<std::byte*>(operation.out), scratch}};
  const auto peerOf = [&](int peer) { return operation.ranks[static_cast<size_t>(peer)]; };
  for (const nccl::Group& each : groups) {
    for (const Move& move : each.moves) {
      if (move.to.bytes == 0) continue;
      std::byte* to = buffers.at(move.to);
      if (move.kind == MoveKind::kCopy) {
        if (to != buffers.at(move.from))
          device_->copy(to, buffers.at(move.from), move.to.bytes, stream);
      } else if (move.kind == MoveKind::kReduce) {
        device_->reduce(to, to, buffers.at(move.from), move.to.bytes / request.element_bytes,
                        operation.dtype, operation.redop, stream);
      } else {
        device_->scale(to, move.to.bytes / request.element_bytes, operation.dtype,
                       request.group_size, stream);
      }
    }
    if (each.sends.empty() && each.recvs.empty()) continue;
    group([&] {
      std::byte* arrival = scratch + temp;
      for (const Recv& recv : each.recvs) {
        if (empty_counts) this->recv(token + 1, 1, peerOf(recv.peer), stream);
        if (recv.to.bytes == 0) continue;
        this->recv(recv.reduce ? arrival : buffers.at(recv.to), recv.to.bytes, peerOf(recv.peer),
                   stream);
        if (recv.reduce) arrival += (recv.to.bytes + 511) / 512 * 512;
      }
      for (const Send& send : each.sends) {
        if (empty_counts) this->send(token, 1, peerOf(send.peer), stream);
        if (send.from.bytes == 0) continue;
        this->send(buffers.at(send.from), send.from.bytes, peerOf(send.peer), stream);
      }
    });
    const std::byte* arrival = scratch + temp;
    for (const Recv& recv : each.recvs) {
      if (!recv.reduce || recv.to.bytes == 0) continue;
      device_->reduce(buffers.at(recv.to), buffers.at(recv.operand), arrival,
                      recv.to.bytes / request.element_bytes, operation.dtype, operation.redop,
                      stream);
      arrival += (recv.to.bytes + 511) / 512 * 512;
    }
  }
  device_->release(scratch, stream);
}

NcclStats NcclWorld::stats() const {
  NcclStats stats = stats_;
  int local = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (!used_[static_cast<size_t>(peer)]) continue;
    ++stats.peers;
    if (node_of_rank_[static_cast<size_t>(peer)] == node_of_rank_[static_cast<size_t>(rank_)])
      ++local;
  }
  stats.buffer_bytes = ncclBufferBytes(local, kP2pChannels);
  return stats;
}

}  // namespace hdpcomm
