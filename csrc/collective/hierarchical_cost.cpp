// What collectives cost on groups that are spread over nodes.
#include <algorithm>
#include <cmath>

#include "collective/cheapest.hpp"
#include "collective/cost.hpp"

namespace hdpcomm {
namespace {

struct Spread {
  explicit Spread(const std::vector<int>& nodes) {
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

// Bytes over the busiest node's link, in units of the bytes that one rank sends. Both directions
// count, by half each: they share the node's work, and the network between the nodes.
double wireShare(Algorithm algorithm, const std::vector<int>& nodes, const Spread& spread) {
  const size_t p = nodes.size();
  if (algorithm == Algorithm::kRing || algorithm == Algorithm::kChain) {
    std::vector<int> leaving(spread.sizes.size());
    for (size_t i = 0; i < p; ++i) {
      if (nodes[i] != nodes[(i + 1) % p]) ++leaving[static_cast<size_t>(nodes[i])];
    }
    return *std::max_element(leaving.begin(), leaving.end());
  }
  double most = 0;  // partners all over the group
  for (const int m : spread.sizes) {
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
  const Spread spread(request.nodes);
  if (algorithm != Algorithm::kHierarchical) {
    TransportCosts shared = remote;
    shared.beta_s_per_byte *= wireShare(algorithm, request.nodes, spread);
    return estimateSeconds(request, algorithm, shared);
  }
  const double p = request.group_size;
  const double n = static_cast<double>(request.count) * static_cast<double>(request.element_bytes);
  const double num_nodes = static_cast<double>(spread.sizes.size());
  const double m = spread.largest;
  const double crossing = remote.alpha_s + (num_nodes - 1) * remote.message_s;
  const double lanes = std::ceil((p - spread.smallest) / spread.smallest);  // ranks that one serves
  const double inside = 2 * local.alpha_s + (m - 1) * (1 + lanes) * local.message_s;
  // A node gives its blocks to all others and takes in theirs; a member then gets from the others
  // of its node all but the lane that it took in itself.
  const double share = (1 + (num_nodes - 2) * spread.largest / p) / 2;
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
