#include "planner/model/rings.hpp"

#include <algorithm>
#include <numeric>
#include <span>

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
  std::vector<int> sizes;
  if (cluster.ranks_per_domain > 0 && domainsOf(ranks, cluster.ranks_per_domain) > 2) {
    sizes.push_back(cluster.ranks_per_domain);
    ring = blockAfterBlock(ranks, sizes);
  }
  if (crowding(ring, cluster) == 1) return ring;
  sizes.push_back(cluster.ranks_per_node);
  return blockAfterBlock(std::move(ranks), sizes);
}

std::vector<int32_t> ringOrder(int first, int count, const Cluster& cluster) {
  std::vector<int32_t> ranks(count);
  std::iota(ranks.begin(), ranks.end(), first);
  return ringOrder(std::move(ranks), cluster);
}

size_t numLinks(const Cluster& cluster) noexcept {
  const int nodes = (cluster.ranks + cluster.ranks_per_node - 1) / cluster.ranks_per_node;
  return cluster.sharesInterfaces() ? size_t{2} * nodes * cluster.nics : 0;
}

std::vector<LinkUse> linksOf(const std::vector<int32_t>& ring, const Cluster& cluster) {
  if (!cluster.sharesInterfaces()) return {};
  const int node = cluster.ranks_per_node;
  std::vector<int32_t> used;
  const auto add = [&](int32_t from, int32_t to) {
    if (from / node == to / node) return;
    for (const int32_t rank : {from, to}) {
      const int way = rank == from ? 0 : 1;
      const int nic = static_cast<int>(static_cast<int64_t>(rank % node) * cluster.nics / node);
      used.push_back((rank / node * cluster.nics + nic) * 2 + way);
    }
  };
  for (size_t i = 0; i < ring.size(); ++i) add(ring[i], ring[i + 1 < ring.size() ? i + 1 : 0]);
  std::sort(used.begin(), used.end());
  std::vector<LinkUse> uses;
  for (const int32_t link : used) {
    if (uses.empty() || uses.back().link != link) uses.push_back({link, 0});
    ++uses.back().messages;
  }
  return uses;
}

double crowding(const std::vector<int32_t>& ring, const Cluster& cluster) {
  int most = 1;
  for (const LinkUse& use : linksOf(ring, cluster)) most = std::max(most, use.messages);
  return most;
}

}  // namespace hdpcomm::planner
