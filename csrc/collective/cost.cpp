#include "collective/cost.hpp"

#include <algorithm>
#include <cmath>

#include "collective/algorithms.hpp"
#include "collective/cheapest.hpp"

namespace hdpcomm {
namespace {

constexpr double kChainPiece = 128 * 1024;

// p ranks, L = ceil(log2 p), q = largest power of two up to p, a = cost of a step with one message.
struct Terms {
  double p;
  double steps;   // L
  double folded;  // 1 if p is no power of two, else 0
  double a;
  double alpha;
  double message;
  double beta;
  double gamma;

  double share(double n) const { return (p - 1) / p * n; }
};

double allGather(Algorithm algorithm, double n, const Terms& t) {
  const double bytes = t.share(n) * t.beta;
  switch (algorithm) {
    case Algorithm::kRing:
      return (t.p - 1) * t.a + bytes;
    case Algorithm::kDirect:
      return t.alpha + (t.p - 1) * t.message + bytes;
    default:  // Bruck
      return t.steps * (t.a + t.message) + bytes;
  }
}

double reduceScatter(Algorithm algorithm, double n, const Terms& t) {
  const double bytes = t.share(n) * (t.beta + t.gamma);
  switch (algorithm) {
    case Algorithm::kRing:
      return (t.p - 1) * t.a + bytes;
    case Algorithm::kDirect:
      return t.alpha + (t.p - 1) * t.message + bytes;
    default:  // recursive
      return t.steps * t.a + bytes + t.folded * (2 * t.a + n * (t.beta + t.gamma));
  }
}

double allReduce(Algorithm algorithm, double n, const Terms& t) {
  const double bytes = t.share(n) * (2 * t.beta + t.gamma);
  switch (algorithm) {
    case Algorithm::kRing:
      return 2 * (t.p - 1) * t.a + bytes;
    case Algorithm::kDirect:
      return 2 * t.alpha + 2 * (t.p - 1) * t.message + bytes;
    case Algorithm::kRecursive:
      return (t.steps - t.folded) * (t.a + n * (t.beta + t.gamma)) +
             t.folded * (2 * t.a + n * (2 * t.beta + t.gamma));
    default:  // Rabenseifner
      return 2 * (t.steps - t.folded) * t.a + bytes +
             t.folded * (2 * t.a + n * (2 * t.beta + t.gamma));
  }
}

double broadcast(Algorithm algorithm, double n, const Terms& t) {
  const double pieces = std::clamp(std::ceil(n / kChainPiece), 1.0, 256.0);
  switch (algorithm) {
    case Algorithm::kBinomial:
      return t.steps * (t.a + n * t.beta);
    case Algorithm::kDirect:  // the receivers copy side by side
      return t.alpha + (t.p - 1) * t.message + n * t.beta;
    default:  // chain
      return (t.p - 2 + pieces) * (t.a + n / pieces * t.beta);
  }
}

double reduce(Algorithm algorithm, double n, const Terms& t) {
  const double pieces = std::clamp(std::ceil(n / kChainPiece), 1.0, 256.0);
  const double byte = t.beta + t.gamma;
  switch (algorithm) {
    case Algorithm::kBinomial:
      return t.steps * (t.a + n * byte);
    case Algorithm::kDirect:
      return t.alpha + (t.p - 1) * (t.message + n * byte);
    default:  // chain
      return (t.p - 2 + pieces) * (t.a + n / pieces * byte);
  }
}

}  // namespace

double estimateSeconds(const ScheduleRequest& request, Algorithm algorithm,
                       const TransportCosts& costs) {
  const double p = request.group_size;
  if (request.group_size <= 1) return 0;
  if (algorithm == Algorithm::kHierarchical) {
    // On one node it is the direct algorithm with one more step.
    return estimateSeconds(request, Algorithm::kDirect, costs) + costs.alpha_s;
  }
  const int q = collective::powerOfTwoBelow(request.group_size);
  const Terms t{.p = p,
                .steps = std::ceil(std::log2(p)),
                .folded = q == request.group_size ? 0.0 : 1.0,
                .a = costs.alpha_s + costs.message_s,
                .alpha = costs.alpha_s,
                .message = costs.message_s,
                .beta = costs.beta_s_per_byte,
                .gamma = costs.gamma_s_per_byte};
  const double block =
      static_cast<double>(request.count) * static_cast<double>(request.element_bytes);
  const double whole = p * block;
  switch (request.op) {
    case OpCode::kAllGather:
      return allGather(algorithm, whole, t);
    case OpCode::kReduceScatter:
      return reduceScatter(algorithm, whole, t);
    case OpCode::kAllReduce:
      return allReduce(algorithm, block, t);
    case OpCode::kBroadcast:
      return broadcast(algorithm, block, t);
    case OpCode::kReduce:
      return reduce(algorithm, block, t);
    case OpCode::kGather:
    case OpCode::kScatter:
      return algorithm == Algorithm::kDirect
                 ? t.alpha + (p - 1) * t.message + t.share(whole) * t.beta
                 : t.steps * t.a + t.steps / 2 * t.share(whole) * t.beta;
    case OpCode::kAllToAll:
      return algorithm == Algorithm::kDirect
                 ? t.alpha + (p - 1) * t.message + t.share(whole) * t.beta
                 : t.steps * (t.a + 1.5 * whole * t.beta);
    case OpCode::kBarrier:
    case OpCode::kPointToPoint:
    case OpCode::kResync:
      return t.steps * t.a;
  }
  return 0;
}

Algorithm chooseAlgorithm(const ScheduleRequest& request, const TransportCosts& costs) {
  return collective::cheapest(collective::candidatesOf(request), [&](Algorithm candidate) {
    return estimateSeconds(request, candidate, costs);
  });
}

}  // namespace hdpcomm
