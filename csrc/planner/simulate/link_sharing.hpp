// Rings of different micro-batches that use the same network interface of a node at the same time:
// how much longer their messages take by that. A link is shared max-min fairly: each message of a
// ring gets what it asks for, or an equal part if that is less. Another ring counts for the share
// of its pass in which it passes messages on.
#pragma once

#include <algorithm>
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
  LinkSharing(const Cluster& cluster, const std::vector<MicroBatch>& batches)
      : flows_(batches.size()), running_(numLinks(cluster)) {
    if (running_.empty()) return;
    uses_.reserve(batches.size());
    for (const MicroBatch& batch : batches) uses_.push_back(linksOf(batch.ranks, cluster));
  }

  // Whether a micro-batch uses any of these links.
  bool uses(int32_t batch) const noexcept { return !uses_.empty() && !uses_[batch].empty(); }

  void start(int32_t batch, const Flow& flow) {
    flows_[batch] = flow;
    for (const LinkUse& use : uses_[batch]) running_[use.link].push_back(batch);
  }

  void finish(int32_t batch) {
    for (const LinkUse& use : uses_[batch]) {
      std::vector<int32_t>& running = running_[use.link];
      running.erase(std::find(running.begin(), running.end(), batch));
    }
  }

  // Those that run now and use a link of this one, itself included if it runs; in order.
  std::vector<int32_t> beside(int32_t batch) const {
    std::vector<int32_t> found;
    for (const LinkUse& use : uses_[batch]) {
      found.insert(found.end(), running_[use.link].begin(), running_[use.link].end());
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  // How many times as long each of its messages takes as over a link of its own.
  double slowdown(int32_t batch) const {
    double most = 1;
    for (const LinkUse& use : uses_[batch]) {
      most = std::max({most, 1.0 * use.messages, 1 / fairShare(batch, use.link)});
    }
    return most;
  }

 private:
  struct Asked {
    double demand;
    double messages;
  };

  // What each message of a running ring gets of a link.
  double fairShare(int32_t batch, int32_t link) const {
    std::vector<Asked> asked;
    double room = 1;
    double all = 0;
    double messages = 0;
    for (const int32_t other : running_[link]) {
      const double weight = other == batch ? 1.0 : flows_[other].present;
      asked.push_back({flows_[other].demand, weight * messagesOn(other, link)});
      all += asked.back().demand * asked.back().messages;
      messages += asked.back().messages;
    }
    if (all <= room) return 1;
    // Those that ask for least get it; the others share what is left.
    std::sort(asked.begin(), asked.end(),
              [](const Asked& a, const Asked& b) { return a.demand < b.demand; });
    for (const Asked& each : asked) {
      if (each.demand * messages >= room) break;
      room -= each.demand * each.messages;
      messages -= each.messages;
    }
    return std::min(1.0, room / messages);
  }

  int messagesOn(int32_t batch, int32_t link) const {
    for (const LinkUse& use : uses_[batch]) {
      if (use.link == link) return use.messages;
    }
    return 0;
  }

  std::vector<std::vector<LinkUse>> uses_;  // by micro-batch; empty: links are not shared
  std::vector<Flow> flows_;
  std::vector<std::vector<int32_t>> running_;  // by link
};

}  // namespace hdpcomm::planner
