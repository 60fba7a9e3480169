// The order in which the ranks of a group pass KV on, and what that asks of the links between
// nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/cost_model.hpp"

namespace hdpcomm::planner {

// Even places upwards, then odd places downwards. No link spans the whole group, and over groups of
// any size on neighbouring ranks a rank has at most four peers. The ring crosses each border
// between nodes twice. `ranks` are sorted.
std::vector<int32_t> ringOrder(std::vector<int32_t> ranks);

// The same where no network interface carries two messages of the ring at once by that, and the
// group lies in two domains at most. Otherwise domain after domain, or node after node, or both, in
// the order above: the ring leaves each of them once. Over groups of any size on neighbouring ranks
// a rank has at most 14 peers by nodes or by domains, and 27 by both.
std::vector<int32_t> ringOrder(std::vector<int32_t> ranks, const Cluster& cluster);
std::vector<int32_t> ringOrder(int first, int count, const Cluster& cluster);

// The most messages that a network interface carries at once one way while the ranks pass KV on in
// this order; 1 on one node, and where each rank has an interface of its own.
int messagesOnALink(const std::vector<int32_t>& ring, const Cluster& cluster);

}  // namespace hdpcomm::planner
