// A collective as planned by one of its ranks: what all of them agree on, and what this one does.
#pragma once

#include <functional>
#include <memory>

#include "collective/schedule.hpp"

namespace hdpcomm {

struct CollectivePlan {
  Call call;
  ScheduleRequest request;                   // as asked: the algorithm may be kAuto
  std::shared_ptr<const Schedule> schedule;  // null where readsPeers(call.algorithm)
};

// How a plan is made: who chooses for kAuto (default: the world), and whether algorithms that read
// the peers' memory, which have no schedule, may be named.
struct PlanningRules {
  std::function<Algorithm(const ScheduleRequest&)> choose = {};
  bool peer_reads = false;
};

}  // namespace hdpcomm
