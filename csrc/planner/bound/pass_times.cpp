#include "planner/bound/pass_times.hpp"

#include <algorithm>
#include <limits>

#include "planner/model/slice_bounds.hpp"

namespace hdpcomm::planner {

PassTimes::PassTimes(const CostModel& cost, const Load& load, int least, int ranks)
    : cost_(cost), load_(load), least_(least), borders_(cost.cluster().largestGroups()) {
  for (const bool backward : {false, true}) {
    int first = least;
    for (size_t i = 0; i < borders_.size(); ++i) {
      fastest_[backward][i] = fastest(first, std::min(borders_[i], ranks), backward);
      first = std::max(least, borders_[i] + 1);
    }
  }
}

double PassTimes::pass(int ranks, bool backward) const {
  double least = std::numeric_limits<double>::infinity();
  int first = least_;
  for (size_t i = 0; i < borders_.size(); ++i) {
    const int last = std::min(borders_[i], ranks);
    if (first <= last) {
      least = std::min(least, seconds(std::min(fastest_[backward][i], last), backward));
    }
    first = std::max(least_, borders_[i] + 1);
  }
  return least;
}

double PassTimes::longest(const CostModel& cost, const Load& load, int first, int last,
                          bool backward) {
  const CostParams& params = cost.params();
  const double share = backward ? 1 - params.forward : params.forward;
  double longest = share * cost.computeSeconds(load, last) / cost.cluster().mostSlices();
  if (first > 1) {  // with the last slice all keys go round
    const double sent = backward ? 1 - params.forward_transfer : params.forward_transfer;
    const double step = cost.stepTransfer(load, first, cost.cluster().leastScope(first));
    longest = std::max(longest, (first - 1) * sent * step);
  }
  return longest + share * (params.fixed + (first - 1) * params.ring_step);
}

double PassTimes::timesFirstSlice(const Cluster& cluster) {
  if (cluster.pipeline == 1) return 1;
  return timesTheFirst(cluster.mostSlices(), 1 + (cluster.chunks - 1.0) / (cluster.pipeline - 1));
}

double PassTimes::seconds(int size, bool backward) const {
  const Cluster& cluster = cost_.cluster();
  const int slices = cluster.mostSlices();
  if (slices > 1 && cluster.chunks == 1) return longest(cost_, load_, size, size, backward);
  const CostParams& params = cost_.params();
  const double compute = cost_.stepCompute(load_, size);
  const double transfer = cost_.stepTransfer(load_, size, cluster.leastScope(size));
  const double rest = size * compute + params.linear * load_.tokens / size + params.fixed +
                      (size - 1) * params.ring_step;
  const double whole =
      backward ? (1 - params.forward) * rest + (size - 1) * cost_.backwardWait(compute, transfer)
               : params.forward * rest + (size - 1) * cost_.forwardWait(compute, transfer);
  if (slices == 1) return whole;
  const double share = backward ? 1 - params.forward : params.forward;
  const double least = share * (params.fixed + (size - 1) * params.ring_step);
  if (backward) return least;  // of whichever slice ends the step
  return std::max(least, (whole + (slices - 1) * least) / timesFirstSlice(cluster));
}

int PassTimes::fastest(int first, int last, bool backward) const {
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (seconds(middle + 1, backward) < seconds(middle, backward)) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

}  // namespace hdpcomm::planner
