// A schedule as a list of NCCL groups.
#pragma once

#include <vector>

#include "hdpcomm/collective/schedule.hpp"

namespace hdpcomm::nccl {

// NCCL takes 256 operations of a group at most before it cuts it into several kernels, perhaps at
// different places on different ranks (pytorch#174942).
inline constexpr size_t kMaxGroup = 256;

struct Group {
  std::vector<Move> moves;  // before it
  std::vector<Send> sends;
  std::vector<Recv> recvs;
};

// Groups block until all of their messages have met, so a deferred send cannot stand where the
// schedule posts it: it goes to the group in which its receiver takes it, if that is later. The
// schedules of the peers are pure functions of the request, so every rank knows these places. Large
// steps become several groups, cut on all ranks alike.
std::vector<Group> groupsOf(const ScheduleRequest& request, const Schedule& schedule);

}  // namespace hdpcomm::nccl
