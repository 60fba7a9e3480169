#include "comm/host/schedule_cache.hpp"

#include <map>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace hdpcomm {
namespace {

constexpr size_t kMaxSchedules = 256;

}  // namespace

void ScheduleCache::setCosts(const TransportCosts& costs) {
  std::lock_guard lock(mutex_);
  costs_ = costs;
  forgetLocked();
}

void ScheduleCache::setNodes(std::vector<int> node_of_rank, const TransportCosts& remote) {
  if (node_of_rank.size() != static_cast<size_t>(world_size_)) {
    throwInvalidUsage("setNodes() got " + std::to_string(node_of_rank.size()) + " nodes for " +
                      std::to_string(world_size_) + " ranks; give one a rank");
  }
  std::lock_guard lock(mutex_);
  node_of_rank_ = std::move(node_of_rank);
  remote_costs_ = remote;
  forgetLocked();
}

void ScheduleCache::forgetLocked() {
  schedules_.clear();
  epoch_.fetch_add(1, std::memory_order_relaxed);
}

std::vector<int> ScheduleCache::nodesOf(const std::vector<int>& ranks) const {
  std::vector<int> nodes;
  if (node_of_rank_.empty()) return nodes;
  std::map<int, int> numbers;
  for (const int rank : ranks) {
    const int node = node_of_rank_[static_cast<size_t>(rank)];
    nodes.push_back(numbers.emplace(node, static_cast<int>(numbers.size())).first->second);
  }
  if (numbers.size() == 1) nodes.clear();
  return nodes;
}

std::shared_ptr<const Schedule> ScheduleCache::get(const ScheduleRequest& request) {
  std::lock_guard lock(mutex_);
  if (const auto found = schedules_.find(request); found != schedules_.end()) return found->second;
  ScheduleRequest chosen = request;
  if (chosen.algorithm == Algorithm::kAuto) {
    chosen.algorithm = chooseAlgorithm(request, costs_, remote_costs_);
  }
  auto made = std::make_shared<const Schedule>(makeSchedule(chosen));
  if (schedules_.size() >= kMaxSchedules) schedules_.clear();
  schedules_.emplace(request, made);
  return made;
}

size_t ScheduleCache::HashRequest::operator()(const ScheduleRequest& request) const noexcept {
  uint64_t hash = static_cast<uint64_t>(request.op) |
                  static_cast<uint64_t>(request.algorithm) << 8 |
                  static_cast<uint64_t>(request.average) << 16 | request.element_bytes << 24 |
                  static_cast<uint64_t>(request.group_size) << 32;
  const auto mix = [&hash](uint64_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  };
  mix(static_cast<uint64_t>(request.rank) | static_cast<uint64_t>(request.root) << 32);
  mix(request.count);
  for (const size_t count : request.in_counts) mix(count);
  for (const size_t count : request.out_counts) mix(count);
  for (const int node : request.nodes) mix(static_cast<uint64_t>(node));
  return hash;
}

}  // namespace hdpcomm
