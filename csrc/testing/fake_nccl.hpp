// NCCL's semantics in one process and without a GPU. Streams are either queues, which run() works
// off in a random order that NCCL's rules allow, or those of simulated devices, which wait for each
// other as a GPU's would.
//
// A send blocks until its receive is posted and the other way round; messages of a pair match in
// the order of posting; the operations of a group progress independently, but the group's stream
// goes on only when all have ended; collectives wait for all ranks. What a stream is given while it
// is captured (test_device.hpp) is issued each time the graph runs. Found are: messages that match
// with different sizes, collectives that differ, waits that never end, groups that are too large,
// memory that is used after its release. Every call can be told to fail.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "device/handles.hpp"
#include "transport/stream/nccl/nccl_world.hpp"

namespace hdpcomm::testing {

class FakeNccl : public std::enable_shared_from_this<FakeNccl> {
 public:
  // `version`: of the library that it plays, as NCCL writes it.
  explicit FakeNccl(int num_ranks, int version = 23203);
  ~FakeNccl();

  // The table of functions; they find the fake by the communicator, or by the calling thread.
  std::shared_ptr<const NcclApi> api();
  // The rank's operations go to streams of this device, and need no run().
  void attach(int rank, DevicePtr device);
  // The rank's queue as a device, where none is attached.
  DevicePtr queue(int rank);
  // Memory for the work that is enqueued next.
  std::byte* allocate(int rank, size_t bytes);
  // Overwrites it when the queue gets there: whatever reads it later gets other data.
  void release(int rank, std::byte* memory, size_t bytes);
  NcclStream stream(int rank);

  // Names the operation to which the rank's next calls belong, for messages about them.
  void label(int rank, const std::string& text);
  // The next call of the function on the rank returns `code`; rank -1: on any.
  void failNext(const std::string& function, int rank, int code);
  // The rank's communicator reports `code` from now on.
  void setAsyncError(int rank, int code);
  // ncclCommInitRankConfig never ends.
  void stallInit() { stall_init_ = true; }
  // The rank's next groups never end on the host, as when a peer does not come to connect.
  void stallGroups(int rank) { ranks_.at(static_cast<size_t>(rank)).stalled = true; }

  // From now on ncclCommDestroy returns only after letDestroy(), as it does while graphs refer to
  // the communicator.
  void holdDestroy();
  void letDestroy();
  int numInDestroy();

  // Calls of the program at which NCCL may hang or crash.
  std::vector<std::string> complaints();

  // Works off all streams. Returns an empty string, or what is wrong; then the fake is spent.
  std::string run(uint64_t seed);

  // --- for the functions of the table
  enum class Kind { kSend, kRecv };
  struct Transfer {
    Kind kind;
    int peer;
    void* data = nullptr;
    size_t bytes = 0;
    bool done = false;
    bool isSend() const { return kind == Kind::kSend; }
  };
  struct Whole {
    std::string name;
    OpCode op;
    const void* in;
    void* out;
    size_t count;
    int type;
    int redop;
    int root;
  };
  // A piece of work of a stream: something local, a group, or a collective.
  struct Item {
    std::function<void()> local;
    std::vector<Transfer> group;
    std::shared_ptr<Whole> whole;
    std::string label;
    bool posted = false;
    bool arrived = false;      // with a device: the stream has come to it
    uint32_t* over = nullptr;  // ... the flag that its stream waits for
  };
  // An item of a graph, issued at every run.
  struct Captured {
    Item item;
    uint32_t over = 0;
    uint64_t capture;
    OwnedEvent end;
  };
  struct Rank {
    FakeNccl* owner = nullptr;
    int rank = -1;
    bool joined = false;
    int polls_left = 0;  // until the call in progress has ended
    bool stalled = false;
    bool aborted = false;
    bool retired = false;
    int async_error = kNcclSuccess;
    int group_depth = 0;
    std::vector<Transfer> collecting;
    std::list<Item> stream;
    std::string label;
    std::vector<std::string> order;  // labels as enqueued, each once
    std::vector<std::unique_ptr<std::byte[]>> memory;
    DevicePtr device;
    Stream device_stream;        // of the call in progress
    std::deque<uint32_t> flags;  // of its items, in the order of issue
    std::list<Captured> captured;
    // In check mode.
    std::vector<OwnedStream> lanes;
    OwnedEvent last;
    std::map<int, size_t> issued_sends;  // by peer
    std::map<int, size_t> issued_recvs;
    size_t issued_wholes = 0;
  };
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }
  int join(NcclComm* comm, int num_ranks, int rank);
  void abort(Rank& rank);
  int destroy(Rank& rank);
  int failureOf(const std::string& function, int rank);
  int enqueue(Rank& rank, Transfer transfer);
  int enqueueWhole(Rank& rank, Whole whole);
  void enqueueLocal(int rank, std::function<void()> work);
  int endGroup(Rank& rank);
  // Waits as holdDestroy() asks, and destroys.
  int destroyUnheld(Rank& rank);
  // Enqueues what the rank has issued on its device. Without the lock.
  void launch(Rank& rank);
  std::vector<Rank>& ranks() { return ranks_; }
  int version() const { return version_; }
  const std::string& lastError() const { return last_error_; }
  bool stalled() const { return stall_init_; }

 private:
  struct Posted {
    Rank* rank;
    Item* item;
    Transfer* transfer;
  };
  // A message, and a collective of all ranks, in check mode.
  struct Staged {
    uint32_t full = 0;
    uint32_t taken = 0;
    std::unique_ptr<std::byte[]> data;
    size_t bytes = 0;
  };
  struct StagedWhole {
    std::vector<uint32_t> given;  // by rank
    std::vector<std::vector<std::byte>> in;
  };
  Staged* stagedOf(int source, int target, size_t number, size_t bytes);
  StagedWhole& stagedWholeOf(size_t number);
  void launchChecked(Rank& rank);
  void launchGroup(Rank& rank, const std::vector<Transfer>& group, Stream stream);
  void launchWhole(Rank& rank, const std::shared_ptr<Whole>& whole, Stream stream);
  std::pair<size_t, size_t> extentOf(const Whole& whole) const;
  std::vector<std::byte> combine(const Whole& whole,
                                 const std::vector<const std::byte*>& ins) const;
  bool start(Rank& rank);
  void finish(Rank& rank);
  void capture(Rank& rank, uint64_t number);
  void begin(Rank& rank, const uint32_t* over);
  void again(Rank& rank, Captured& captured);
  void goOn();
  bool allAtWhole() const;
  std::string match(int source, int target);
  std::string runWhole();
  std::string stuck();
  std::string culprit() const;
  std::string who(const Posted& posted) const;

  std::mutex mutex_;
  std::condition_variable destroy_let_;
  bool destroy_held_ = false;
  int in_destroy_ = 0;
  std::vector<Rank> ranks_;
  std::map<std::pair<std::string, int>, int> failures_;
  std::map<std::pair<int, int>, std::deque<Posted>> sends_;
  std::map<std::pair<int, int>, std::deque<Posted>> recvs_;
  std::vector<std::pair<int, int>> ready_;
  std::map<std::pair<int, int>, std::deque<Staged>> staged_;
  std::deque<StagedWhole> staged_wholes_;
  std::string last_error_;
  std::vector<std::string> complaints_;
  bool stall_init_ = false;
  const int version_;
};

}  // namespace hdpcomm::testing
