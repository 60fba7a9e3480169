// The transfers of a schedule as NCCL groups.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "collective/schedule.hpp"
#include "transport/stream/nccl/nccl_world.hpp"

namespace hdpcomm::nccl {

// NCCL takes 256 operations of a group at most before it cuts it into several kernels, perhaps at
// different places on different ranks (pytorch#174942).
inline constexpr size_t kMaxGroup = NcclWorld::kMaxExchange;

struct Group {
  size_t step = 0;  // in which it runs; the number of steps: after the last one
  std::vector<Send> sends;
  std::vector<Recv> recvs;
};

// A group holds its stream up until all of its messages have moved, so a deferred send cannot be in
// the group of the step that posts it: it would wait for a receiver that is some steps behind.
// Where a schedule may have such sends, every message gets a time, at which both of its ends would
// be posted if only the schedule held ranks up, and goes to the group of that time on both ranks.
// All ranks run their groups in the order of time, so none waits for a later one. The schedules of
// the peers are pure functions of the request, so every rank knows these times. Large groups become
// several, cut alike on all ranks. Messages with group ranks that are `elsewhere` are left out,
// alike on both ends.
std::vector<Group> groupsOf(const ScheduleRequest& request, const Schedule& schedule,
                            const std::vector<bool>& elsewhere = {});

// The groups of a schedule and the scratch memory of one run: the schedule's own temporary memory,
// then what arrives to be reduced, then the two bytes that a barrier sends and receives.
struct GroupPlan {
  GroupPlan(const ScheduleRequest& request, std::shared_ptr<const Schedule> planned,
            const std::vector<bool>& elsewhere = {});

  std::shared_ptr<const Schedule> schedule;
  std::vector<Group> groups;  // by step
  size_t arrivals_offset;
  size_t token_offset;
  size_t scratchBytes() const { return token_offset + 2; }
};

// Group plans by schedule, since a schedule's groups take longer to make than to run.
class GroupPlans {
 public:
  std::shared_ptr<const GroupPlan> get(const ScheduleRequest& request,
                                       const std::shared_ptr<const Schedule>& schedule,
                                       std::vector<bool> elsewhere);

 private:
  using Key = std::pair<const Schedule*, std::vector<bool>>;
  std::map<Key, std::shared_ptr<const GroupPlan>> plans_;
};

}  // namespace hdpcomm::nccl
