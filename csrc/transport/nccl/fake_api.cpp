// The fake's table of functions. A communicator and a stream are both a FakeNccl::Rank.
#include <cstring>

#include "fake_nccl.hpp"

namespace hdpcomm::nccl {
namespace {

using Rank = FakeNccl::Rank;

// The functions without a communicator need to know which rank calls, and which fake; ranks of a
// fake are driven from one thread at a time.
thread_local FakeNccl* current_fake = nullptr;
thread_local std::vector<Rank*> grouped;  // ranks that called something in the open group
thread_local int group_depth = 0;

Rank& rankOf(NcclComm comm) { return *reinterpret_cast<Rank*>(comm); }

int getVersion(int* version) {
  *version = current_fake->version();
  return current_fake->failureOf("ncclGetVersion", -1);
}

int getUniqueId(NcclUniqueId* id) {
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::memcpy(id->bytes, &current_fake, sizeof current_fake);
  return current_fake->failureOf("ncclGetUniqueId", -1);
}

int commInitRankConfig(NcclComm* comm, int num_ranks, NcclUniqueId id, int rank,
                       NcclConfig* config) {
  FakeNccl* fake = nullptr;
  std::memcpy(&fake, id.bytes, sizeof fake);
  if (config->magic != 0xcafebeef || config->size < sizeof(NcclConfig)) return kNcclInvalidArgument;
  if (const int code = fake->failureOf("ncclCommInitRankConfig", rank)) return code;
  return fake->join(comm, num_ranks, rank);
}

int commDestroy(NcclComm) { return kNcclSuccess; }

int commAbort(NcclComm comm) {
  rankOf(comm).stream.clear();
  return kNcclSuccess;
}

int commGetAsyncError(NcclComm comm, int* error) {
  Rank& rank = rankOf(comm);
  const bool joining = rank.owner->stalled() || rank.polls++ < 2;
  *error = joining ? kNcclInProgress : rank.async_error;
  return rank.owner->failureOf("ncclCommGetAsyncError", rank.rank);
}

const char* getErrorString(int result) {
  static constexpr const char* kTexts[] = {
      "no error",         "unhandled cuda error", "system error", "internal error",
      "invalid argument", "invalid usage",        "remote error", "in progress"};
  return result >= 0 && result < 8 ? kTexts[result] : "unknown result code";
}

const char* getLastError(NcclComm) {
  return current_fake == nullptr ? "" : current_fake->lastError().c_str();
}

int groupStart() {
  ++group_depth;
  return current_fake->failureOf("ncclGroupStart", -1);
}

int groupEnd() {
  int result = kNcclSuccess;
  if (--group_depth == 0) {
    for (Rank* rank : grouped) {
      if (const int code = rank->owner->endGroup(*rank); code != kNcclSuccess) result = code;
    }
    grouped.clear();
  }
  const int planted = current_fake->failureOf("ncclGroupEnd", -1);
  return planted != kNcclSuccess ? planted : result;
}

int transfer(const char* name, bool is_send, void* data, size_t count, int peer, NcclComm comm) {
  Rank& rank = rankOf(comm);
  if (const int code = rank.owner->failureOf(name, rank.rank)) return code;
  if (group_depth > 0 && rank.group_depth == 0) {
    rank.group_depth = 1;
    grouped.push_back(&rank);
  }
  return rank.owner->enqueue(rank, {is_send, peer, data, count});
}

int send(const void* data, size_t count, int, int peer, NcclComm comm, NcclStream) {
  return transfer("ncclSend", true, const_cast<void*>(data), count, peer, comm);
}

int recv(void* data, size_t count, int, int peer, NcclComm comm, NcclStream) {
  return transfer("ncclRecv", false, data, count, peer, comm);
}

int whole(NcclComm comm, FakeNccl::Whole what) {
  Rank& rank = rankOf(comm);
  if (const int code = rank.owner->failureOf(what.name, rank.rank)) return code;
  return rank.owner->enqueueWhole(rank, std::move(what));
}

int allReduce(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
              NcclStream) {
  return whole(comm, {"ncclAllReduce", OpCode::kAllReduce, in, out, count, type, op, -1});
}

int allGather(const void* in, void* out, size_t count, int type, NcclComm comm, NcclStream) {
  return whole(comm, {"ncclAllGather", OpCode::kAllGather, in, out, count, type, 0, -1});
}

int reduceScatter(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                  NcclStream) {
  return whole(comm, {"ncclReduceScatter", OpCode::kReduceScatter, in, out, count, type, op, -1});
}

int broadcast(const void* in, void* out, size_t count, int type, int root, NcclComm comm,
              NcclStream) {
  return whole(comm, {"ncclBroadcast", OpCode::kBroadcast, in, out, count, type, 0, root});
}

}  // namespace

FakeNccl::~FakeNccl() {
  if (current_fake == this) current_fake = nullptr;
}

std::shared_ptr<const NcclApi> FakeNccl::api() {
  current_fake = this;
  auto table = std::make_shared<NcclApi>();
  table->path = "the fake NCCL";
  table->version = version_;
  table->getVersion = getVersion;
  table->getUniqueId = getUniqueId;
  table->commInitRankConfig = commInitRankConfig;
  table->commDestroy = commDestroy;
  table->commAbort = commAbort;
  table->commGetAsyncError = commGetAsyncError;
  table->getErrorString = getErrorString;
  table->getLastError = getLastError;
  table->groupStart = groupStart;
  table->groupEnd = groupEnd;
  table->send = send;
  table->recv = recv;
  table->allReduce = allReduce;
  table->allGather = allGather;
  table->reduceScatter = reduceScatter;
  table->broadcast = broadcast;
  return table;
}

}  // namespace hdpcomm::nccl
