// Replays the record of a check and finds accesses that nothing orders.
#pragma once

#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "testing/check/device_check.hpp"
#include "testing/check/shadow.hpp"
#include "testing/check/trace.hpp"

namespace hdpcomm::testing::check {

// Runs all operations of a trace once, in a random order (by the seed) that events, flags,
// submission and the host's waits allow, with a vector clock for each entity. Whether two accesses
// are ordered depends on the clocks and not on the random order:
//   - a waitValue takes over the clock of the earliest write that may have let it pass, not of the
//     one that did in this order;
//   - an access is forgotten only when a later one finds the same races (Shadow).
// The random order matters only where several unordered writes to one flag may let a wait pass.
class Replay {
 public:
  Replay(const Trace& trace, uint64_t seed, const std::optional<OrderingSite>& ignore);
  std::vector<CheckReport> run();

 private:
  using Clock = std::vector<uint32_t>;  // by entity: how many of its operations happened before
  using Snapshot = std::shared_ptr<const Clock>;
  struct FlagWrite {
    uint32_t value = 0;
    NodeId node = kNoNode;
  };
  struct UnwrittenRead {
    NodeId node = kNoNode;
    Shadow::Bytes bytes;
  };

  const Node& at(NodeId id) const { return trace_.nodes[static_cast<size_t>(id)]; }
  bool replayed(NodeId id) const { return id == kNoNode || clocks_[static_cast<size_t>(id)]; }
  bool ordered(NodeId earlier, NodeId later) const;
  bool ignored(const Node& node) const;
  // The node that a wait for an event waits for: the event's record, or an older one if that record
  // is ignored.
  NodeId awaited(const Node& node) const;
  bool enabled(NodeId id);
  void step(NodeId id);
  void acquire(int entity, NodeId from);
  void acquire(int entity, const Clock& from);
  // The merged clock of this release and all earlier ones of its key, for an acquire that follows;
  // null while one of them is not replayed.
  const Clock* releasesBefore(NodeId last);
  uint32_t flagValue(const uint32_t* flag) const;
  // The write whose clock a wait takes over, or kNoNode.
  NodeId writeSeenBy(NodeId wait) const;
  void findUnwritten(NodeId id);
  void access(NodeId id);
  void touch(NodeId id, const MemoryRange& range, AccessKind kind);
  void reportDeadlocks();
  void reportNeverWritten();

  CheckedOp describe(NodeId id, const char* how) const;
  std::string place(const std::byte* begin, const std::byte* end) const;
  void add(std::string kind, const CheckedOp& first, const CheckedOp& second, std::string text);

  const Trace& trace_;
  std::mt19937_64 random_;
  std::optional<OrderingSite> ignore_;
  std::vector<int> order_;           // entities, sorted by their keys
  std::vector<size_t> next_;         // by entity: its next node
  std::vector<Snapshot> snapshots_;  // by entity: its clock now
  std::vector<Snapshot> clocks_;     // by node: its clock, once replayed
  std::unordered_map<const uint32_t*, std::vector<FlagWrite>> flags_;
  std::unordered_map<NodeId, Clock> releases_;
  std::map<const std::byte*, NodeId> blocks_;  // allocations, live or freed
  std::vector<UnwrittenRead> unwritten_reads_;
  std::set<NodeId> raced_;  // operations that a report of a race names
  Shadow shadow_;
  std::set<std::tuple<std::string, std::string, unsigned, std::string, unsigned>> seen_;
  std::vector<CheckReport> reports_;
};

bool isOrdering(const Node& node);
// The name of an ordering call for reports: "record", "wait", ...
const char* orderingCall(const Node& node);
bool sameSite(const Site& a, const Site& b);

}  // namespace hdpcomm::testing::check
