#include "planner/simulate/link_sharing.hpp"

#include <algorithm>

namespace hdpcomm::planner {

LinkSharing::LinkSharing(const Cluster& cluster, const std::vector<MicroBatch>& batches)
    : cluster_(cluster), flows_(batches.size()), running_(numLinks(cluster)) {
  if (running_.empty()) return;
  uses_.reserve(batches.size());
  for (const MicroBatch& batch : batches) uses_.push_back(linksOf(batch.ranks, cluster));
}

void LinkSharing::start(int32_t batch, const Flow& flow) {
  flows_[batch] = flow;
  for (const LinkUse& use : uses_[batch]) running_[use.link].push_back(batch);
}

void LinkSharing::finish(int32_t batch) {
  for (const LinkUse& use : uses_[batch]) {
    std::vector<int32_t>& running = running_[use.link];
    running.erase(std::find(running.begin(), running.end(), batch));
  }
}

std::vector<int32_t> LinkSharing::beside(int32_t batch) const {
  std::vector<int32_t> found;
  for (const LinkUse& use : uses_[batch]) {
    found.insert(found.end(), running_[use.link].begin(), running_[use.link].end());
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

double LinkSharing::slowdown(int32_t batch) const {
  double most = 1;
  for (const LinkUse& use : uses_[batch]) {
    const double room = roomOf(use.link, cluster_);
    most = std::max({most, use.messages / room, 1 / fairShare(batch, use.link, room)});
  }
  return most;
}

double LinkSharing::fairShare(int32_t batch, int32_t link, double room) const {
  std::vector<Asked> asked;
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

int LinkSharing::messagesOn(int32_t batch, int32_t link) const {
  for (const LinkUse& use : uses_[batch]) {
    if (use.link == link) return use.messages;
  }
  return 0;
}

}  // namespace hdpcomm::planner
