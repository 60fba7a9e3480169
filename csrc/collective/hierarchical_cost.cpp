// What collectives cost on groups that span several nodes.
#include <algorithm>
#include <cmath>

#include "collective/cheapest.hpp"
#include "collective/cost.hpp"

namespace hdpcomm {
namespace {

struct NodeSizes {
  explicit NodeSizes(const std::vector<int>& nodes) {
    for (const int node : nodes) {
      if (static_cast<size_t>(node) >= sizes.size()) sizes.resize(static_cast<size_t>(node) + 1);
      ++sizes[static_cast<size_t>(node)];
    }
    largest = *std::max_element(sizes.begin(), sizes.end());
    smallest = *std::min_element(sizes.begin(), sizes.end());
  }
  std::vector<int> sizes;
  int largest = 0;
  int smallest = 0;
};

// Bytes over the busiest node's link, in units of the bytes that one rank sends. Each direction
// counts half: both share the node's processors and the network between the nodes.
double wireShare(Algorithm algorithm, const std::vector<int>& nodes, const NodeSizes& by_node) {
  const size_t p = nodes.size();
  if (algorithm == Algorithm::kRing || algorithm == Algorithm::kChain) {
    std::vector<int> leaving(by_node.sizes.size());
    for (size_t i = 0; i < p; ++i) {
      if (nodes[i] != nodes[(i + 1) % p]) ++leaving[static_cast<size_t>(nodes[i])];
    }
    return *std::max_element(leaving.begin(), leaving.end());
  }
  double most = 0;  // in the other algorithms the partners are all over the group
  for (const int m : by_node.sizes) {
    most = std::max(most, m * (static_cast<double>(p) - m) / (static_cast<double>(p) - 1));
  }
  return most;
}

}  // namespace

double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& local, const TransportCosts& remote) {
  if (request.nodes.empty() || request.group_size <= 1) {
    return estimateSeconds(request, algorithm, local);
  }
  const NodeSizes by_node(request.nodes);
  if (algorithm != Algorithm::kHierarchical) {
    TransportCosts shared = remote;
    shared.beta_s_per_byte *= wireShare(algorithm, request.nodes, by_node);
    return estimateSeconds(request, algorithm, shared);
  }
  const double p = request.group_size;
  const double n = static_cast<double>(request.count) * static_cast<double>(request.element_bytes);
  const double num_nodes = static_cast<double>(by_node.sizes.size());
  const double m = by_node.largest;
  const double crossing = remote.alpha_s + (num_nodes - 1) * remote.message_s;
  // Ranks that one member serves as a lane.
  const double lanes = std::ceil((p - by_node.smallest) / by_node.smallest);
  const double inside = 2 * local.alpha_s + (m - 1) * (1 + lanes) * local.message_s;
  // A node sends its blocks to all other nodes and receives theirs; each member then gets from the
  // others of its node everything except what it received itself.
  const double share = (1 + (num_nodes - 2) * by_node.largest / p) / 2;
  const auto gather = [&](double whole) {
    return crossing + inside + whole * share * remote.beta_s_per_byte +
           whole * (m - 1) / m * local.beta_s_per_byte;
  };
  const double depth = std::ceil(std::log2(num_nodes));
  switch (request.op) {
    case OpCode::kAllGather:
      return gather(p * n);
    case OpCode::kReduceScatter:
      return gather(p * n) + p * n * local.gamma_s_per_byte;
    case OpCode::kAllReduce:
      return 2 * gather(n) + n * local.gamma_s_per_byte;
    case OpCode::kBroadcast:
      return depth * (remote.alpha_s + remote.message_s + n * remote.beta_s_per_byte) +
             local.alpha_s + (m - 1) * local.message_s + n * local.beta_s_per_byte;
    default:  // reduce
      return depth * (remote.alpha_s + remote.message_s +
                      n * (remote.beta_s_per_byte + remote.gamma_s_per_byte)) +
             local.alpha_s +
             (m - 1) * (local.message_s + n * (local.beta_s_per_byte + local.gamma_s_per_byte));
  }
}

Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& local,
                          const TransportCosts& remote) {
  if (request.nodes.empty()) return chooseAlgorithm(request, local);
  return collective::cheapest(collective::candidatesOf(request), [&](Algorithm candidate) {
    return estimateSeconds(request, candidate, local, remote);
  });
}

}  // namespace hdpcomm
