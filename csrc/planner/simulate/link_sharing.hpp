// Rings of different micro-batches that use the same network interface of a node, or the same
// uplink of a domain, at the same time: how much longer their messages take by that. A link is
// shared max-min fairly: each message of a ring gets what it asks for, or an equal part if that is
// less. Another ring counts for the share of its pass in which it passes messages on.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/rings.hpp"

namespace hdpcomm::planner {

// What a pass of a ring asks of the links that it crosses.
struct Flow {
  double demand = 0;   // share of a ring step in which one message would keep a link busy
  double present = 0;  // share of the pass in which messages are passed on
};

class LinkSharing {
 public:
  LinkSharing(const Cluster& cluster, const std::vector<MicroBatch>& batches);

  // Whether a micro-batch uses any of these links.
  bool uses(int32_t batch) const noexcept { return !uses_.empty() && !uses_[batch].empty(); }

  void start(int32_t batch, const Flow& flow);
  void finish(int32_t batch);

  // Those that run now and use a link of this one, itself included if it runs; in order.
  std::vector<int32_t> beside(int32_t batch) const;

  // How many times as long each of its messages takes as over a link of its own.
  double slowdown(int32_t batch) const;

 private:
  struct Asked {
    double demand;
    double messages;
  };

  // What each message of a running ring gets of a link with room for so many.
  double fairShare(int32_t batch, int32_t link, double room) const;

  int messagesOn(int32_t batch, int32_t link) const;

  const Cluster& cluster_;
  std::vector<std::vector<LinkUse>> uses_;  // by micro-batch; empty: links are not shared
  std::vector<Flow> flows_;
  std::vector<std::vector<int32_t>> running_;  // by link
};

}  // namespace hdpcomm::planner
