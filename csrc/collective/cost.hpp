// What an algorithm costs on a transport, by the alpha-beta-gamma model (Thakur, Rabenseifner and
// Gropp 2005; Chan et al. 2007), and the choice that follows from it.
#pragma once

#include "collective/schedule.hpp"

namespace hdpcomm {

// Of one transport. `hdpcomm perf --calibrate` measures them; the defaults are those of shared
// memory.
struct TransportCosts {
  double alpha_s = 0.6e-6;            // of a step that waits for another rank
  double message_s = 0.15e-6;         // of each message of a step, sent and received
  double beta_s_per_byte = 1.2e-10;   // of moving a byte
  double gamma_s_per_byte = 0.8e-10;  // of reducing a byte
};

// Seconds of an operation by an algorithm that it has. Depends on nothing that differs between
// ranks.
double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& costs);
// The cheapest algorithm, the first of algorithmsOf() among equals: the same on all ranks with
// equal costs.
Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& costs);

// The same for a group whose ranks are spread over nodes (request.nodes): `local` are the costs
// inside a node, `remote` those between nodes, where beta is of a node's link that its ranks share.
double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& local, const TransportCosts& remote);
Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& local,
                          const TransportCosts& remote);

}  // namespace hdpcomm
