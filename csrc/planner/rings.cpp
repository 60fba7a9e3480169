#include "planner/rings.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <utility>

namespace hdpcomm::planner {
namespace {

// Even places upwards, then odd places downwards.
template <typename T>
std::vector<T> thereAndBack(const std::vector<T>& items) {
  std::vector<T> order;
  order.reserve(items.size());
  for (size_t i = 0; i < items.size(); i += 2) order.push_back(items[i]);
  for (size_t i = items.size() / 2; i > 0; --i) order.push_back(items[2 * i - 1]);
  return order;
}

// A ring that leaves each block once, or a part of one (not `whole`); `sizes`: of the largest
// blocks, then of those inside them.
// Inside the smallest ones it goes there and back, from the side where the group has all of the
// block's ranks, so that the ranks that talk to other blocks are the same ones for groups of any
// size.
std::vector<int32_t> blockAfterBlock(std::vector<int32_t> ranks, std::span<const int> sizes,
                                     bool whole = true) {
  if (sizes.empty()) return thereAndBack(ranks);
  const int size = sizes.front();
  std::vector<std::vector<int32_t>> blocks;
  for (const int32_t rank : ranks) {
    if (blocks.empty() || blocks.back().front() / size != rank / size) blocks.emplace_back();
    blocks.back().push_back(rank);
  }
  if (whole) std::reverse(blocks.front().begin(), blocks.front().end());
  std::vector<int32_t> ring;
  ring.reserve(ranks.size());
  for (auto& block : thereAndBack(blocks)) {
    for (const int32_t rank : blockAfterBlock(std::move(block), sizes.subspan(1), false)) {
      ring.push_back(rank);
    }
  }
  return ring;
}

// How many domains sorted ranks lie in.
int domainsOf(const std::vector<int32_t>& ranks, int ranks_per_domain) {
  int count = 1;
  for (size_t i = 1; i < ranks.size(); ++i) {
    count += ranks[i] / ranks_per_domain != ranks[i - 1] / ranks_per_domain;
  }
  return count;
}

}  // namespace

std::vector<int32_t> ringOrder(std::vector<int32_t> ranks) { return thereAndBack(ranks); }

std::vector<int32_t> ringOrder(std::vector<int32_t> ranks, const Cluster& cluster) {
  std::vector<int32_t> ring = thereAndBack(ranks);
  if (cluster.neighbours) return ring;
  std::vector<int> sizes;
  if (cluster.ranks_per_domain > 0 && domainsOf(ranks, cluster.ranks_per_domain) > 2) {
    sizes.push_back(cluster.ranks_per_domain);
    ring = blockAfterBlock(ranks, sizes);
  }
  if (messagesOnALink(ring, cluster) == 1) return ring;
  sizes.push_back(cluster.ranks_per_node);
  return blockAfterBlock(std::move(ranks), sizes);
}

std::vector<int32_t> ringOrder(int first, int count, const Cluster& cluster) {
  std::vector<int32_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), first);
  return ringOrder(std::move(ranks), cluster);
}

int messagesOnALink(const std::vector<int32_t>& ring, const Cluster& cluster) {
  const int node = cluster.ranks_per_node;
  if (cluster.nics == 0 || cluster.nics >= node) return 1;
  const auto link = [&](int32_t rank) {
    const auto place = static_cast<int64_t>(rank % node);
    return std::pair(rank / node, static_cast<int>(place * cluster.nics / node));
  };
  std::map<std::pair<int, int>, std::pair<int, int>> messages;  // of a link: sent, received
  int most = 1;
  for (size_t i = 0; i < ring.size(); ++i) {
    const int32_t from = ring[i];
    const int32_t to = ring[i + 1 < ring.size() ? i + 1 : 0];
    if (from / node == to / node) continue;
    most = std::max({most, ++messages[link(from)].first, ++messages[link(to)].second});
  }
  return most;
}

}  // namespace hdpcomm::planner
