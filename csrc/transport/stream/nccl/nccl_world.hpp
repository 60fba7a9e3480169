// A rank's end of one global NCCL communicator: schedules as groups on the caller's stream.
//
// There is one communicator for all subsets; nothing is created for a subset. All ranks enqueue
// their operations in one global order (docs/architecture.md), so messages of a pair need no tags
// and no mix of overlapping subsets can deadlock.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/schedule.hpp"
#include "kernels/reduce.hpp"
#include "transport/stream/nccl/nccl_api.hpp"

namespace hdpcomm {

namespace nccl {
struct Group;
}

// What an operation does on a stream besides NCCL's calls. Everything is ordered by the stream.
class NcclDevice {
 public:
  virtual ~NcclDevice() = default;
  // Memory that may be used by what is enqueued from now on, until release() in the same stream.
  virtual void* allocate(size_t bytes, NcclStream stream) = 0;
  virtual void release(void* memory, NcclStream stream) = 0;
  // Zeros.
  virtual void clear(void* memory, size_t bytes, NcclStream stream) = 0;
  virtual void copy(void* to, const void* from, size_t bytes, NcclStream stream) = 0;
  // out[i] = a[i] op b[i]
  virtual void reduce(void* out, const void* a, const void* b, size_t count, DType dtype, RedOp op,
                      NcclStream stream) = 0;
  virtual void scale(void* data, size_t count, DType dtype, double divisor, NcclStream stream) = 0;
};

struct NcclStats {
  uint64_t groups = 0;
  uint64_t messages_sent = 0;
  uint64_t bytes_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_received = 0;
  uint64_t remote_bytes_sent = 0;  // of these, to and from other nodes
  uint64_t remote_bytes_received = 0;
  int peers = 0;                 // distinct ones with which there were messages
  uint64_t buffer_bytes = 0;     // that NCCL has for them, by its source (see ncclBufferBytes)
  uint64_t whole_world_ops = 0;  // that went to NCCL's own collectives
  uint64_t puts = 0;             // of the messages sent
};

// What NCCL takes of device memory for peers of the same host: a receive buffer of 10,485,760 and a
// send buffer of 2,097,152 bytes for each channel (nccl#1685; src/init.cc, src/transport/p2p.cc).
uint64_t ncclBufferBytes(int local_peers, int channels);

class NcclWorld {
 public:
  // Called now and then while a call waits on the host; throws to give up.
  using Look = std::function<void()>;

  // Joins the communicator. All ranks call it with rank 0's id. Throws Timeout past the deadline
  // (the attempt is aborted), Device when NCCL fails. `timeout_s`: of every later call too.
  // `node_of_rank`: for the prediction of memory; empty: one node.
  NcclWorld(std::shared_ptr<const NcclApi> api, std::shared_ptr<NcclDevice> device,
            const NcclUniqueId& id, int rank, int size, double timeout_s,
            std::vector<int> node_of_rank = {}, const Look& look = {});
  // Aborts the communicator, unless it was retired: nobody waits for it.
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Messages between this rank and these go another way (Beside), on both ends; by rank. Before
  // the first operation.
  void leaveOut(std::vector<bool> peers) { left_out_ = std::move(peers); }
  bool leavesOut(int peer) const {
    return !left_out_.empty() && left_out_[static_cast<size_t>(peer)];
  }

  // Exchanges a byte with each of the peers up to a distance, but with those that are left out, in
  // an order that is fixed for all ranks, so that NCCL connects the pairs now and not inside an
  // operation (nccl#783). Collective over all ranks.
  void connectAhead(int max_distance, NcclStream stream, const Look& look = {});

  // The part of a schedule that goes another way, step by step, on the operation's stream.
  class Beside {
   public:
    virtual ~Beside() = default;
    // After the step's moves: starts its transfers with the peers that are left out. Buffer::kTemp
    // of the schedule begins at `temp`.
    virtual void begin(const Step& step, std::byte* temp) = 0;
    // Later work of the stream comes after them, but for deferred sends.
    virtual void end() = 0;
    // ... and after these, too. Once, after the last step.
    virtual void finish() = 0;
  };

  struct Operation {
    ScheduleRequest request;  // op, algorithm, sizes; rank and group_size are those of `ranks`
    std::vector<int> ranks;   // global, in order; this rank is one of them
    const void* in = nullptr;
    void* out = nullptr;
    DType dtype = DType::kUint8;
    RedOp redop = RedOp::kNone;
    std::shared_ptr<const Schedule> schedule;  // of the request, if it is there already
    Beside* beside = nullptr;                  // where some of `ranks` are left out
  };
  // Before what is captured into a graph: NCCL must have its connections by then, since making them
  // takes calls that a capture does not allow (NCCL 2.12, "Using NCCL with CUDA Graphs"). Throw
  // InvalidUsage where there was no message with the peer yet, or no operation of NCCL's own of
  // this kind.
  void checkConnected(int peer) const;
  bool isConnected(int peer) const {
    return peer == rank_ || connected_[static_cast<size_t>(peer)];
  }
  void checkConnected(const Operation& operation);
  // Device memory that the operation will allocate.
  size_t scratchBytes(const Operation& operation);
  // Enqueues a collective. The whole world in its own order goes to NCCL's own collective where
  // there is one and the algorithm is kAuto.
  void collective(const Operation& operation, NcclStream stream, const Look& look = {});

  // Empty if ranks can put messages into each other's memory, or what is missing.
  std::string putsMissing();
  // A window: memory of NCCL's that is registered on all ranks, into which peers put messages.
  // Collective; the same size on all ranks, > 0, and nothing is missing on any. Ends with a put to
  // the next rank: NCCL connects for the first one, which takes all ranks.
  void openWindow(size_t bytes, NcclStream stream, const Look& look = {});
  std::byte* window() const { return static_cast<std::byte*>(window_memory_); }
  // Collective; nothing that uses the window is under way.
  void closeWindow(const Look& look = {});

  static constexpr size_t kNoPlace = ~size_t{0};
  struct Message {
    void* data = nullptr;
    size_t bytes = 0;
    int peer = -1;  // global rank
    // Offset in the receiver's window: then the message is a put, and `data` lies in the window of
    // its rank, too.
    size_t place = kNoPlace;
  };
  // Messages that one group can hold; throws InvalidUsage for more.
  static constexpr size_t kMaxExchange = 256;
  static void checkExchange(size_t sends, size_t recvs);
  // Enqueues sends and receives as one group; puts first. What one side of a pair puts and receives
  // by puts in one exchange must be one exchange on the other side, too: the signals of a pair are
  // told apart by their order only.
  void exchange(const std::vector<Message>& sends, const std::vector<Message>& recvs,
                NcclStream stream, const Look& look = {});

  // Throws when the communicator has failed since. Cheap; called while something is waited for.
  void checkAsync();
  // The orderly end: all operations have ended, and the other ranks retire as well. May wait.
  void retire() noexcept;
  // Gives up everything that is under way; the world cannot be used any more.
  void abort() noexcept;

  NcclStats stats() const;

 private:
  // A schedule as groups, and the memory that they need.
  struct Prepared {
    std::shared_ptr<const Schedule> schedule;
    std::vector<nccl::Group> groups;
    size_t temp_bytes;
    size_t arrival_bytes;
    size_t scratchBytes() const { return temp_bytes + arrival_bytes + 2; }
  };
  using PreparedKey = std::pair<const Schedule*, std::vector<bool>>;
  std::shared_ptr<const Prepared> prepare(const Operation& operation);
  std::vector<bool> elsewhere(const std::vector<int>& ranks) const;
  // Two bytes behind the rest of the scratch memory.
  static std::byte* tokensOf(const Prepared& prepared, std::byte* scratch) {
    return scratch + prepared.temp_bytes + prepared.arrival_bytes;
  }
  void settle(int result, const char* call, const Look& look);
  void group(const Look& look, const std::function<void()>& calls);
  bool isWhole(const Operation& operation) const;
  void runWhole(const Operation& operation, NcclStream stream, const Look& look);
  void runSchedule(const Operation& operation, NcclStream stream, const Look& look);
  void runMoves(const std::vector<Move>& moves, const Operation& operation, std::byte* scratch,
                NcclStream stream);
  void runGroup(const nccl::Group& group, const Operation& operation, const Prepared& prepared,
                std::byte* scratch, NcclStream stream, const Look& look);
  void put(const std::vector<Message>& sends, const std::vector<Message>& recvs, NcclStream stream,
           const Look& look);
  void awaitSignals(const std::vector<Message>& messages, NcclStream stream, const Look& look);
  void freeWindow() noexcept;
  void countSent(size_t bytes, int peer);
  void countReceived(size_t bytes, int peer);
  void send(const void* data, size_t bytes, int peer, NcclStream stream);
  void recv(void* data, size_t bytes, int peer, NcclStream stream);
  bool isRemote(int peer) const;
  void use(int peer);
  void checkUsable() const;
  void check(int result, const char* call);

  std::shared_ptr<const NcclApi> api_;
  std::shared_ptr<NcclDevice> device_;
  int rank_;
  int size_;
  std::vector<int> node_of_rank_;
  NcclComm comm_ = nullptr;
  double timeout_s_;
  std::vector<bool> used_;       // by peer: there were messages
  std::vector<bool> connected_;  // ... others than puts
  std::vector<OpCode> whole_used_;
  NcclStats stats_;
  std::vector<bool> left_out_;  // empty: nobody
  void* window_memory_ = nullptr;
  NcclWindow window_ = nullptr;
  std::map<PreparedKey, std::shared_ptr<const Prepared>> prepared_;
};

}  // namespace hdpcomm
