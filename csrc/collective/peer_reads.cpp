#include "collective/peer_reads.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "collective/cheapest.hpp"

namespace hdpcomm {

bool readsPeers(Algorithm algorithm) {
  return algorithm == Algorithm::kOneShot || algorithm == Algorithm::kTwoShot;
}

const std::vector<Algorithm>& peerReadersOf(OpCode op) {
  static const std::vector<Algorithm> both = {Algorithm::kOneShot, Algorithm::kTwoShot};
  static const std::vector<Algorithm> one = {Algorithm::kOneShot};
  static const std::vector<Algorithm> none;
  switch (op) {
    case OpCode::kAllReduce:
      return both;
    case OpCode::kAllGather:
    case OpCode::kReduceScatter:
      return one;
    default:
      return none;
  }
}

double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const DeviceTransportCosts& costs) {
  if (!readsPeers(algorithm)) return estimateSeconds(request, algorithm, costs.messages);
  if (request.group_size <= 1) return 0;
  const double p = request.group_size;
  const PeerReadCosts& reads = costs.reads;
  // A block (all-gather, reduce-scatter) or the whole buffer (all-reduce).
  const double block =
      static_cast<double>(request.count) * static_cast<double>(request.element_bytes);
  const double others = (p - 1) * block;
  double copied = block;  // bytes that the rank copies into its window and out of it
  double copies = 1;
  double published = block;  // bytes that pass through the window, a piece at a time
  double moved = others;     // bytes that the kernel reads from peers and writes to them
  if (request.op == OpCode::kReduceScatter) {
    copied = others;
    copies = 2;
    published = p * block;
  } else if (algorithm == Algorithm::kTwoShot) {
    copied = moved = 2 * others / p;
    copies = 4;
  }
  const double pieces = std::max(1.0, std::ceil(published / costs.window_bytes));
  // A meeting enqueues three operations per peer, a copy one more.
  return pieces * (reads.round_s + (2 * (p - 1) + copies / 3) * reads.signal_s) +
         copied * costs.messages.gamma_s_per_byte + moved * reads.read_s_per_byte;
}

Algorithm chooseAlgorithm(const ScheduleRequest& request, const DeviceTransportCosts& costs) {
  std::vector<Algorithm> candidates = {chooseAlgorithm(request, costs.messages)};
  if (request.group_size <= kMaxPeerReaders) {
    const std::vector<Algorithm>& readers = peerReadersOf(request.op);
    candidates.insert(candidates.end(), readers.begin(), readers.end());
  }
  return collective::cheapest(
      candidates, [&](Algorithm candidate) { return estimateSeconds(request, candidate, costs); });
}

}  // namespace hdpcomm
