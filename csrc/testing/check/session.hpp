// One check: records all operations, and runs them in an order that the seed chooses.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "device/simulated/op.hpp"
#include "testing/check/device_check.hpp"
#include "testing/check/trace.hpp"

namespace hdpcomm::testing::check {

// Operations run on the host threads that wait for devices, one at a time under one lock. The seed
// chooses one of three modes (see Mode) and which of the operations that can run is next. A copy
// runs in pieces; until its end the rest of its destination holds poison. Thread-safe.
class Session {
 public:
  explicit Session(uint64_t seed);

  static std::shared_ptr<Session> current();  // null if no check runs
  static void begin(const std::shared_ptr<Session>& session);
  void end();

  void enterRank(int rank);
  void leaveRank();

  int addStream(int device);
  // Puts the operation at the end of the stream.
  void submit(int stream, Op op);
  NodeId record(int stream, NodeId previous, Site site);
  void waitEvent(int stream, NodeId record, Site site);
  // Query of an event, given by its record, and waits for it or for the end of a stream.
  bool query(NodeId record);
  void synchronizeEvent(NodeId record, double timeout_s, const DeviceApi::InterruptCheck& check,
                        Site site);
  void synchronizeStream(int stream, double timeout_s, const DeviceApi::InterruptCheck& check,
                         Site site);

  void allocated(void* memory, size_t bytes, Site site);
  void freed(Mapping mapping, size_t bytes, Site site);
  // Keeps the memory of a destroyed device mapped: operations that use it may still run.
  void keepMapped(std::vector<Mapping> mappings);
  void touched(NodeKind kind, const void* data, size_t bytes, Site site);
  void storeFlag(uint32_t* flag, uint32_t value, Site site);
  void ordered(NodeKind kind, uint64_t key);

  void checkEnded();
  // Valid after the end.
  const Trace& trace() const { return trace_; }
  uint64_t seed() const { return seed_; }

 private:
  // When operations run. kLazy: only what a waiting host needs, as late as possible. kRandom: any,
  // at random moments. kEager: all, as soon as possible.
  enum class Mode : uint8_t { kLazy, kRandom, kEager };
  struct Waiter {
    double timeout_s = 0;
    std::vector<int64_t> key;  // of its host
    NodeId target = kNoNode;
    bool expired = false;
  };
  struct StreamState {
    size_t next = 0;           // index of the entity's next node
    size_t pieces = 0;         // of the copy that has begun
    std::vector<size_t> left;  // pieces not copied yet; the next one is at the back
  };

  // These need the lock.
  Node& at(NodeId id) { return trace_.nodes[static_cast<size_t>(id)]; }
  const Node& at(NodeId id) const { return trace_.nodes[static_cast<size_t>(id)]; }
  bool executed(NodeId id) const;
  void checkRunning() const;
  int addEntity(std::string name, std::vector<int64_t> key);
  int host();
  NodeId append(int entity, Node node);
  NodeId appendHost(Node node);
  void submitFlag(int stream, NodeKind kind, const FlagValue& flag, bool of_kernel, Op op);
  void addFlag(const uint32_t* flag);
  void noteOverwrittenFlags(NodeId id);
  bool enabled(int stream) const;
  void step(int stream);
  bool copyPiece(StreamState& state, const Op& op);  // true: that was the last one
  void execute(NodeId id, Op& op);
  std::optional<int> choose(NodeId wanted);
  bool stepFor(NodeId wanted);
  void stepSome();
  void await(NodeId target, NodeId waiting, double timeout_s,
             const DeviceApi::InterruptCheck& check, std::unique_lock<std::mutex>& lock);
  bool allRanksWait() const;
  void expireOne();
  std::string progressText(NodeId target) const;

  const uint64_t seed_;
  const Mode mode_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  bool running_ = true;
  std::optional<Error> fault_;  // of a kernel
  Trace trace_;
  std::map<NodeId, Op> ops_;  // not run yet
  std::map<int, StreamState> streams_;
  std::map<int, int> streams_of_device_;
  std::map<std::thread::id, int> hosts_;
  std::map<int, int> hosts_of_ranks_;
  std::set<int> ranks_;  // host entities of the ranks that have entered and not left
  std::vector<Waiter*> waiters_;
  std::map<uint64_t, NodeId> releases_;  // by key: its last release
  uint64_t steps_ = 0;
  std::vector<Mapping> freed_;  // blocks stay mapped until the end, so that no address is reused
};

}  // namespace hdpcomm::testing::check
