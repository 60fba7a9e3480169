// Collectives whose kernels read and write the memory of all peers: which operations have them,
// what they cost, and the choice between them and schedules of messages. They have no Schedule; a
// transport that maps the peers' memory runs them (transport/stream/links/peer_reads.hpp).
#pragma once

#include <vector>

#include "collective/cost.hpp"

namespace hdpcomm {

// True for kOneShot and kTwoShot.
bool readsPeers(Algorithm algorithm);
// The algorithms of this kind that an operation has, possibly none.
const std::vector<Algorithm>& peerReadersOf(OpCode op);
// The largest group: the kernels' argument lists hold no more.
inline constexpr int kMaxPeerReaders = 64;

// Costs of such an operation. For each window's worth of the operand the ranks meet twice, before
// and after a kernel: each writes a flag of every peer and waits for theirs.
struct PeerReadCosts {
  double round_s = 5e-6;             // a kernel between two meetings
  double signal_s = 3e-6;            // each peer of a meeting: flag written, awaited and reset
  double read_s_per_byte = 2.8e-12;  // a byte that a kernel moves from or to a peer
};

// Costs of collectives on a transport of device memory. `hdpcomm acceptance --costs`
// measures them; the defaults are derived for H100 SXM, not measured:
//   1 us    an operation enqueued on a stream: short kernels follow each other 0.9 us slower than
//           they run (NVIDIA, "Getting Started with CUDA Graphs": 2.9 and 3.8 us)
//   message 12 of them: wait and reset of a flag, put, event recorded and awaited twice, each side
//   alpha   4 of them from the flag to the end of the copy, and 1 us over NVLink
//   signal  3 of them; round: as alpha
//   beta    NVLink, 450 GB/s each way (datasheet), of which 80% are reached; reads of peers as well
//   gamma   3 accesses a byte to memory of 3.35 TB/s (datasheet), of which 85% are reached
struct DeviceTransportCosts {
  TransportCosts messages{.alpha_s = 5e-6,
                          .message_s = 12e-6,
                          .beta_s_per_byte = 2.8e-12,
                          .gamma_s_per_byte = 1.05e-12};
  PeerReadCosts reads;
  double window_bytes = 32 << 20;  // a rank's memory that peers read; a setting, not measured
};

// Estimated seconds of an operation by one of algorithmsOf() or peerReadersOf().
double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const DeviceTransportCosts& costs);
// The cheapest of algorithmsOf() and, for groups up to kMaxPeerReaders, of peerReadersOf(). Ranks
// with equal costs choose alike.
Algorithm chooseAlgorithm(const ScheduleRequest& request, const DeviceTransportCosts& costs);

}  // namespace hdpcomm
