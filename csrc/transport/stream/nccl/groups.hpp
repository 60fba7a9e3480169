// A schedule as a list of NCCL groups.
#pragma once

#include <vector>

#include "collective/schedule.hpp"
#include "transport/stream/nccl/nccl_world.hpp"

namespace hdpcomm::nccl {

// NCCL takes 256 operations of a group at most before it cuts it into several kernels, perhaps at
// different places on different ranks (pytorch#174942).
inline constexpr size_t kMaxGroup = NcclWorld::kMaxExchange;

struct Group {
  std::vector<Move> moves;  // before it
  std::vector<Send> sends;
  std::vector<Recv> recvs;
  size_t step = 0;     // of the schedule; after its last one: only what was deferred
  bool first = false;  // of the step's groups
  bool last = false;
};

// Groups block until all of their messages have met, so a deferred send cannot stand where the
// schedule posts it: it would wait for a receiver that is some steps behind. Where there may be
// such sends, every message gets a time, that at which both of its ends are posted if nothing but
// the schedule holds a rank up, and goes to the group of that time on both ranks: all ranks run
// their groups in the order of time, so none waits for a later one. The schedules of the peers are
// pure functions of the request, so every rank knows these times. Large groups become several, cut
// on all ranks alike. Messages of group ranks that are `elsewhere` are left out, alike on both
// ends.
std::vector<Group> groupsOf(const ScheduleRequest& request, const Schedule& schedule,
                            const std::vector<bool>& elsewhere = {});

}  // namespace hdpcomm::nccl
