// A rank's end of one global NCCL communicator: groups of messages, and NCCL's own collectives, on
// the caller's stream.
//
// There is one communicator for all subsets; nothing is created for a subset. All ranks enqueue
// their operations in one global order (docs/architecture.md), so messages of a pair need no tags
// and no mix of overlapping subsets can deadlock.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device_api.hpp"
#include "transport/stats.hpp"
#include "transport/stream/nccl/nccl_api.hpp"

namespace hdpcomm {

inline NcclStream ncclStreamOf(Stream stream) {
  return reinterpret_cast<NcclStream>(stream.handle);
}

// Blocks that share one allocation begin at multiples of 512 bytes.
inline size_t paddedBytes(size_t bytes) { return (bytes + 511) / 512 * 512; }

// What NCCL takes of device memory for peers of the same host: a receive buffer of 10,485,760 and a
// send buffer of 2,097,152 bytes for each channel (nccl#1685; src/init.cc, src/transport/p2p.cc).
uint64_t ncclBufferBytes(int local_peers, int channels);

class NcclWorld {
 public:
  // Called now and then while a call waits on the host; throws to give up.
  using WaitCheck = DeviceApi::InterruptCheck;

  // Joins the communicator. All ranks call it with rank 0's id. Throws Timeout past the deadline
  // (the attempt is aborted), Device when NCCL fails. `timeout_s` also limits every later call.
  // `node_of_rank`: for the prediction of memory; empty: one node.
  NcclWorld(std::shared_ptr<const NcclApi> api, const NcclUniqueId& id, int rank, int size,
            double timeout_s, std::vector<int> node_of_rank = {}, const WaitCheck& check = {});
  // Aborts the communicator, unless it was retired: nobody waits for it.
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Messages between this rank and these go another way, on both ends; by rank. Before the first
  // operation.
  void leaveOut(std::vector<bool> peers) { left_out_ = std::move(peers); }
  bool leavesOut(int peer) const {
    return !left_out_.empty() && left_out_[static_cast<size_t>(peer)];
  }
  // By position in `ranks`; empty where nobody at all is left out.
  std::vector<bool> leftOutOf(const std::vector<int>& ranks) const;

  // Exchanges a byte with each of the peers up to a distance, except for those that are left out,
  // in an order that is fixed for all ranks, so that NCCL connects the pairs now and not inside an
  // operation (nccl#783). Collective over all ranks. `bytes`: two bytes of device memory, sent and
  // received.
  void connectAhead(int max_distance, std::byte* bytes, NcclStream stream,
                    const WaitCheck& check = {});
  // Before what is captured into a graph: NCCL must have its connections by then, since making them
  // takes calls that a capture does not allow (NCCL 2.12, "Using NCCL with CUDA Graphs"). Throw
  // InvalidUsage where there was no message with the peer yet, or no collective of this kind by
  // runWhole().
  void checkConnected(int peer) const;
  void checkConnected(OpCode whole) const;

  struct Message {
    void* data = nullptr;
    size_t bytes = 0;
    int peer = -1;  // global rank
  };
  using Messages = std::vector<Message>;
  // Messages that one group can hold; throws InvalidUsage for more.
  static constexpr size_t kMaxExchange = 256;
  static void checkExchange(size_t sends, size_t recvs);
  // Enqueues sends and receives as one group.
  void exchange(const Messages& sends, const Messages& recvs, NcclStream stream,
                const WaitCheck& check = {});

  // A collective of all ranks by NCCL itself.
  struct Whole {
    OpCode op = OpCode::kBarrier;
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;  // as in ScheduleRequest
    DType dtype = DType::kUint8;
    RedOp redop = RedOp::kNone;
    int root = -1;
  };
  // Whether NCCL has the operation, and these are all ranks of the world in its own order.
  bool hasWhole(OpCode op, DType dtype, const std::vector<int>& ranks) const;
  void runWhole(const Whole& operation, NcclStream stream, const WaitCheck& check = {});

  // Throws when the communicator has failed since. Cheap; called while something is waited for.
  void checkAsync();
  // An operation goes into a graph, which keeps the communicator until the graph goes.
  void keepForGraph() { in_graphs_ = true; }
  // The orderly end: all operations have ended, and the other ranks retire as well. May wait, but
  // not for graphs.
  void retire() noexcept;
  // Gives up everything that is under way; the world cannot be used any more.
  void abort() noexcept;

  // Those of MessageCounts (the peers are distinct ones), and
  //   nccl_groups             groups so far
  //   nccl_whole_world_ops    collectives by NCCL itself
  //   predicted_buffer_bytes  device memory that NCCL takes for this rank's peers, by its source
  Stats stats() const;

 private:
  void destroyWithGraphs() noexcept;
  struct Counts {
    MessageCounts messages;
    uint64_t groups = 0;
    uint64_t whole_world_ops = 0;
  };
  void await(int result, const char* call, const WaitCheck& check);
  void group(const WaitCheck& check, const std::function<void()>& calls);
  void countSent(size_t bytes, int peer);
  void countReceived(size_t bytes, int peer);
  void send(const void* data, size_t bytes, int peer, NcclStream stream);
  void recv(void* data, size_t bytes, int peer, NcclStream stream);
  bool isRemote(int peer) const;
  void checkUsable() const;
  void checkResult(int result, const char* call);

  std::shared_ptr<const NcclApi> api_;
  int rank_;
  int size_;
  std::vector<int> node_of_rank_;
  NcclComm comm_ = nullptr;
  bool in_graphs_ = false;  // captured operations refer to it
  double timeout_s_;
  std::vector<bool> connected_;  // by peer: there were messages
  std::vector<OpCode> whole_used_;
  Counts counts_;
  std::vector<bool> left_out_;  // empty: nobody
};

}  // namespace hdpcomm
