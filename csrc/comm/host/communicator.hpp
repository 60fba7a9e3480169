// An ordered set of ranks of a world. Making one sends nothing and registers nothing: it is a list
// and a hash.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "collective/plan.hpp"
#include "comm/host/world.hpp"

namespace hdpcomm {

class Communicator {
 public:
  // All ranks of the world, in order.
  explicit Communicator(std::shared_ptr<World> world);

  // Positions in this communicator, in the order wanted. Null when this rank is not among them.
  // Throws InvalidUsage for an empty list, a duplicate or a position that does not exist. Local: no
  // other rank takes part.
  std::shared_ptr<Communicator> subset(std::span<const int> positions) const;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(ranks_->size()); }
  const std::vector<int>& ranks() const { return *ranks_; }
  uint64_t hash() const { return hash_; }
  World& world() const { return *world_; }
  const std::shared_ptr<World>& sharedWorld() const { return world_; }

  // What a collective works on. `count` as in ScheduleRequest. Splits of a ragged all_to_all: the
  // elements for and from each rank (both empty otherwise).
  struct Operands {
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;
    DType dtype = DType::kUint8;
    std::vector<size_t> in_counts = {};
    std::vector<size_t> out_counts = {};
  };
  struct Options {
    OpCode op = OpCode::kBarrier;
    RedOp redop = RedOp::kNone;
    int root = -1;
    Algorithm algorithm = Algorithm::kAuto;

    bool operator==(const Options&) const = default;
  };
  using Message = hdpcomm::Message;
  using InterruptCheck = World::InterruptCheck;

  // For a StreamEngine, which runs the plan on a device.
  CollectivePlan plan(const Operands& operands, const Options& options,
                      const PlanningRules& rules) const;
  CollectivePlan plan(const Operands& operands, const Options& options) const {
    return plan(operands, options, {});
  }
  Call callOfMessages() const;
  // The global rank of a position; throws InvalidUsage for one that does not exist.
  int globalRank(int position, const char* what) const;
  const Ranks& sharedRanks() const { return ranks_; }

  // Starts an operation; it proceeds in the background. World::wait() ends it.
  std::shared_ptr<Work> startCollective(const Operands& operands, const Options& options) const;
  std::shared_ptr<Work> startExchange(std::span<const Message> sends,
                                      std::span<const Message> recvs) const;
  // Runs an operation to its end; throws its error. A timeout of 0 or less: the world's.
  void collective(const Operands& operands, const Options& options, double timeout_s,
                  const InterruptCheck& check_interrupt) const;
  void exchange(std::span<const Message> sends, std::span<const Message> recvs, double timeout_s,
                const InterruptCheck& check_interrupt) const;
  // Collective; see World::resync().
  void resync(double timeout_s, const InterruptCheck& check_interrupt, bool quiet) const;

 private:
  Communicator(std::shared_ptr<World> world, Ranks ranks, int rank);
  void checkPosition(int position, const char* what) const;
  // The plan that a loop makes again and again.
  struct LastPlan {
    Options options;
    size_t count = 0;
    DType dtype = DType::kUint8;
    uint64_t epoch = 0;
    Call call;
    std::shared_ptr<const Schedule> schedule;
  };
  CollectiveWork makeCollective(Ranks ranks, const Operands& operands,
                                const Options& options) const;
  void checkPositions(std::span<const Message> sends, std::span<const Message> recvs) const;
  Call callOfMessage(const Message& message) const;

  std::shared_ptr<World> world_;
  Ranks ranks_;
  int rank_;
  uint64_t hash_;
  std::vector<int> nodes_;  // of the ranks; empty when they share one
  mutable std::mutex mutex_;
  mutable LastPlan last_plan_;  // under the mutex; another thread may use this communicator, too
};

}  // namespace hdpcomm
