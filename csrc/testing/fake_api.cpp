// The fake's table of functions. A communicator and a stream are both a FakeNccl::Rank.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "testing/fake_nccl.hpp"

namespace hdpcomm::testing {
namespace {

using Rank = FakeNccl::Rank;

// The fake for functions without a communicator: the one whose table this thread took last.
thread_local FakeNccl* current_fake = nullptr;
thread_local std::vector<Rank*> grouped;  // ranks that called something in the open group
thread_local int group_depth = 0;
// Whose communicator this thread used last: the rank of its calls without a communicator.
thread_local int last_rank = -1;

Rank& rankOf(NcclComm comm) {
  auto& rank = *reinterpret_cast<Rank*>(comm);
  last_rank = rank.rank;
  return rank;
}

int failureOf(const char* function) {
  if (current_fake == nullptr) return kNcclSuccess;
  const auto held = current_fake->lock();
  return current_fake->failureOf(function, last_rank);
}

int getVersion(int* version) {
  *version = current_fake->version();
  return failureOf("ncclGetVersion");
}

int getUniqueId(NcclUniqueId* id) {
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::memcpy(id->bytes, &current_fake, sizeof current_fake);
  return failureOf("ncclGetUniqueId");
}

int commInitRankConfig(NcclComm* comm, int num_ranks, NcclUniqueId id, int rank,
                       NcclConfig* config) {
  FakeNccl* fake = nullptr;
  std::memcpy(&fake, id.bytes, sizeof fake);
  if (config->magic != 0xcafebeef || config->size < sizeof(NcclConfig)) return kNcclInvalidArgument;
  const auto held = fake->lock();
  if (const int code = fake->failureOf("ncclCommInitRankConfig", rank)) return code;
  return fake->join(comm, num_ranks, rank);
}

int commDestroy(NcclComm comm) { return rankOf(comm).owner->destroyUnheld(rankOf(comm)); }

int commAbort(NcclComm comm) {
  const auto held = rankOf(comm).owner->lock();
  rankOf(comm).owner->abort(rankOf(comm));
  return kNcclSuccess;
}

int commGetAsyncError(NcclComm comm, int* error) {
  Rank& rank = rankOf(comm);
  const auto held = rank.owner->lock();
  const bool in_progress = rank.owner->stalled() || rank.polls_left > 0;
  if (rank.polls_left > 0) --rank.polls_left;
  *error = in_progress ? kNcclInProgress : rank.async_error;
  return rank.owner->failureOf("ncclCommGetAsyncError", rank.rank);
}

const char* getErrorString(int result) {
  static constexpr const char* kTexts[] = {
      "no error",         "unhandled cuda error", "system error", "internal error",
      "invalid argument", "invalid usage",        "remote error", "in progress"};
  return result >= 0 && result < 8 ? kTexts[result] : "unknown result code";
}

const char* getLastError(NcclComm comm) {
  FakeNccl* const fake = comm != nullptr ? rankOf(comm).owner : current_fake;
  thread_local std::string text;
  if (fake == nullptr) return "";
  const auto held = fake->lock();
  text = fake->lastError();
  return text.c_str();
}

int groupStart() {
  const int code = failureOf("ncclGroupStart");
  if (code == kNcclSuccess) ++group_depth;
  return code;
}

// A communicator that does not block says at once that the call is in progress.
int inProgress(Rank& rank, int result) {
  if (result != kNcclSuccess) return result;
  auto held = rank.owner->lock();
  const bool stalled = rank.stalled;
  rank.polls_left = stalled ? std::numeric_limits<int>::max() : 1;
  held.unlock();
  if (!stalled) rank.owner->launch(rank);
  return kNcclInProgress;
}

int groupEnd() {
  int result = kNcclSuccess;
  if (--group_depth == 0) {
    for (Rank* rank : std::exchange(grouped, {})) {
      auto held = rank->owner->lock();
      const int code = rank->owner->endGroup(*rank);
      held.unlock();
      if (const int state = inProgress(*rank, code); state != kNcclSuccess) result = state;
    }
  }
  const int planted = failureOf("ncclGroupEnd");
  return planted != kNcclSuccess ? planted : result;
}

// The error of a call that is not allowed now, or that a test makes fail; else success.
int refusal(Rank& rank, const char* name) {
  if (const int code = rank.owner->failureOf(name, rank.rank)) return code;
  return rank.polls_left > 0 || rank.aborted ? kNcclInvalidUsage : kNcclSuccess;
}

// Checks a call and runs `enqueue(rank)`, inside of the open group or as a group of its own.
template <typename Enqueue>
int transfer(const char* name, NcclComm comm, NcclStream stream, Enqueue enqueue) {
  Rank& rank = rankOf(comm);
  auto held = rank.owner->lock();
  if (const int code = refusal(rank, name)) return code;
  if (rank.device != nullptr) rank.device_stream = {reinterpret_cast<uintptr_t>(stream)};
  const bool in_group = group_depth > 0;
  if (in_group && rank.group_depth == 0) {
    rank.group_depth = 1;
    grouped.push_back(&rank);
  }
  const int code = enqueue(rank);
  held.unlock();
  return in_group ? code : inProgress(rank, code);
}

int send(const void* data, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
  return transfer("ncclSend", comm, stream, [&](Rank& rank) {
    return rank.owner->enqueue(rank, {.kind = FakeNccl::Kind::kSend,
                                      .peer = peer,
                                      .data = const_cast<void*>(data),
                                      .bytes = count});
  });
}

int recv(void* data, size_t count, int, int peer, NcclComm comm, NcclStream stream) {
  return transfer("ncclRecv", comm, stream, [&](Rank& rank) {
    return rank.owner->enqueue(
        rank, {.kind = FakeNccl::Kind::kRecv, .peer = peer, .data = data, .bytes = count});
  });
}

int whole(NcclComm comm, FakeNccl::Whole what, NcclStream stream) {
  Rank& rank = rankOf(comm);
  auto held = rank.owner->lock();
  if (const int code = refusal(rank, what.name.c_str())) return code;
  if (rank.device != nullptr) rank.device_stream = {reinterpret_cast<uintptr_t>(stream)};
  const int code = rank.owner->enqueueWhole(rank, std::move(what));
  held.unlock();
  return inProgress(rank, code);
}

int allReduce(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
              NcclStream stream) {
  return whole(comm, {"ncclAllReduce", OpCode::kAllReduce, in, out, count, type, op, -1}, stream);
}

int allGather(const void* in, void* out, size_t count, int type, NcclComm comm, NcclStream stream) {
  return whole(comm, {"ncclAllGather", OpCode::kAllGather, in, out, count, type, 0, -1}, stream);
}

int reduceScatter(const void* in, void* out, size_t count, int type, int op, NcclComm comm,
                  NcclStream stream) {
  return whole(comm, {"ncclReduceScatter", OpCode::kReduceScatter, in, out, count, type, op, -1},
               stream);
}

int broadcast(const void* in, void* out, size_t count, int type, int root, NcclComm comm,
              NcclStream stream) {
  return whole(comm, {"ncclBroadcast", OpCode::kBroadcast, in, out, count, type, 0, root}, stream);
}

}  // namespace

FakeNccl::~FakeNccl() {
  if (current_fake == this) current_fake = nullptr;
}

std::shared_ptr<const NcclApi> FakeNccl::api() {
  current_fake = this;
  // The functions reach the fake through their communicators.
  const std::shared_ptr<NcclApi> table(new NcclApi,
                                       [fake = shared_from_this()](NcclApi* api) { delete api; });
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

}  // namespace hdpcomm::testing
