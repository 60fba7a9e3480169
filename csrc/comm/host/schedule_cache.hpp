// The schedules of a rank's collectives, made once each, and what the choice of an algorithm goes
// by: measured costs and the node of each rank.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "collective/cost.hpp"
#include "collective/schedule.hpp"

namespace hdpcomm {

// Thread-safe.
class ScheduleCache {
 public:
  explicit ScheduleCache(int world_size) : world_size_(world_size) {}

  // What kAuto goes by; must be equal on all ranks.
  void setCosts(const TransportCosts& costs);
  // The node of each rank of the world, and what kAuto goes by between nodes; equal on all ranks.
  // Before the first operation.
  void setNodes(std::vector<int> node_of_rank, const TransportCosts& remote);
  // The nodes of the given ranks, numbered by first appearance; empty when all share one.
  std::vector<int> nodesOf(const std::vector<int>& ranks) const;
  // Changes whenever kAuto may choose differently from then on.
  uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }
  // The schedule of a request. The cache is bounded.
  std::shared_ptr<const Schedule> get(const ScheduleRequest& request);

 private:
  struct HashRequest {
    size_t operator()(const ScheduleRequest& request) const noexcept;
  };
  void forgetLocked();

  const int world_size_;
  std::vector<int> node_of_rank_;  // empty: one node. Set before the first operation
  std::atomic<uint64_t> epoch_{0};
  std::mutex mutex_;  // of what follows
  TransportCosts costs_;
  TransportCosts remote_costs_;
  std::unordered_map<ScheduleRequest, std::shared_ptr<const Schedule>, HashRequest> schedules_;
};

}  // namespace hdpcomm
