// The order in which the ranks of a group pass KV on, and what that asks of the links between
// nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

// Even places upwards, then odd places downwards. No link spans the whole group, and over groups of
// any size on neighbouring ranks a rank has at most four peers. The ring crosses each border
// between nodes twice. `ranks` are sorted.
std::vector<int32_t> ringOrder(std::vector<int32_t> ranks);

// The same where no link has more than one message of the ring (crowding()) by that, and the group
// lies in two domains at most. Otherwise domain after domain, or node after node, or both, in
// the order above: the ring leaves each of them once. Over groups of any size on neighbouring ranks
// a rank has at most 14 peers by nodes or by domains, and 27 by both.
std::vector<int32_t> ringOrder(std::vector<int32_t> ranks, const Cluster& cluster);
std::vector<int32_t> ringOrder(int first, int count, const Cluster& cluster);

// How many messages of a ring pass a network interface of a node that ranks share, one way.
struct LinkUse {
  int32_t link = 0;
  int messages = 0;
};

// The shared links that a ring uses; none on one node.
std::vector<LinkUse> linksOf(const std::vector<int32_t>& ring, const Cluster& cluster);
// Such links of the cluster.
size_t numLinks(const Cluster& cluster) noexcept;

// The most messages of a ring on a link, at least 1: its messages take so many times as long as
// over links of their own.
double crowding(const std::vector<int32_t>& ring, const Cluster& cluster);

}  // namespace hdpcomm::planner
