// What an algorithm costs on a transport by the alpha-beta-gamma model (Thakur, Rabenseifner and
// Gropp 2005; Chan et al. 2007), and the choice of the cheapest one.
#pragma once

#include "collective/schedule.hpp"

namespace hdpcomm {

// Costs of steps, messages and reductions on one transport. `hdpcomm acceptance --costs`
// measures them; the defaults are for shared memory.
struct TransportCosts {
  double alpha_s = 0.6e-6;            // a step that waits for another rank
  double message_s = 0.15e-6;         // each message of a step, sent and received
  double beta_s_per_byte = 1.2e-10;   // moving a byte
  double gamma_s_per_byte = 0.8e-10;  // reducing a byte
};

// Estimated seconds of an operation by one of its algorithms; the same on all ranks.
double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& costs);
// The cheapest algorithm, of equal ones the first in algorithmsOf(), so that ranks with equal costs
// choose alike.
Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& costs);

// The same for a group that spans several nodes (request.nodes): `local` are the costs inside a
// node, `remote` those between nodes; their beta is that of a node's link, which its ranks share.
double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& local, const TransportCosts& remote);
Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& local,
                          const TransportCosts& remote);

}  // namespace hdpcomm
