#include "planner/model/cost_model.hpp"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace hdpcomm::planner {

std::vector<double> Cluster::speedLimits() const {
  constexpr size_t kMost = kMostSpeedLimits - 1;  // without 0
  std::vector<double> different = speeds;
  std::sort(different.begin(), different.end(), std::greater<>());
  different.erase(std::unique(different.begin(), different.end()), different.end());
  const size_t stride = (different.size() + kMost - 1) / kMost;
  std::vector<double> limits;
  for (size_t i = 0; i < different.size(); i += stride) limits.push_back(different[i]);
  limits.push_back(0);
  return limits;
}

// What is checked here depends on several values; each by itself is checked in Python.
CostModel::CostModel(const CostParams& params, const MemoryParams& memory, const Cluster& cluster)
    : params_(params), memory_(memory), cluster_(cluster) {
  if (params.kv_inter < params.kv_intra || params.latency_inter < params.latency_intra) {
    throwInvalidUsage(
        "the link between nodes is faster than the one inside a node: give both the values of the "
        "faster one");
  }
  if (cluster.ranks_per_domain > 0 &&
      (params.kv_domain < params.kv_intra || params.kv_inter < params.kv_domain ||
       params.latency_domain < params.latency_intra ||
       params.latency_inter < params.latency_domain)) {
    throwInvalidUsage(
        "the links between nodes of a domain are faster than those inside a node, or slower than "
        "those between domains: give both the values of the faster one");
  }
  if (!(memory.offloadable >= 0 && memory.offloadable < 1)) {
    throwInvalidUsage("offloadable is " + std::to_string(memory.offloadable) +
                      ", expected a share in [0, 1)");
  }
  normaliseSpeeds();
  const auto full = [](double speed) { return speed == 1; };
  if (std::all_of(cluster_.speeds.begin(), cluster_.speeds.end(), full)) cluster_.speeds.clear();
  findKinds();
}

void CostModel::findKinds() {
  kind_of_.assign(static_cast<size_t>(cluster_.pipeline) * cluster_.chunks, 0);
  const std::vector<StageWork> works = std::exchange(cluster_.stage_work, {});
  if (std::all_of(works.begin(), works.end(),
                  [](const StageWork& each) { return each == StageWork{1, 1, 1}; })) {
    return;
  }
  if (works.size() != kind_of_.size()) {
    throwInvalidUsage("the work of " + std::to_string(works.size()) + " stages was given for " +
                      std::to_string(kind_of_.size()) + " stages: give that of each");
  }
  std::vector<StageWork> kinds;
  for (size_t stage = 0; stage < works.size(); ++stage) {
    const auto known = std::find(kinds.begin(), kinds.end(), works[stage]);
    kind_of_[stage] = static_cast<int>(known - kinds.begin());
    if (known != kinds.end()) continue;
    kinds.push_back(works[stage]);
    kinds_.push_back(times(works[stage]));
  }
  cluster_.stage_work = works;
}

CostModel CostModel::times(const StageWork& work) const {
  CostParams params = params_;
  MemoryParams memory = memory_;
  Cluster cluster = cluster_;
  cluster.stage_work.clear();
  const auto& [linear, attention, fixed] = work;
  for (double* each : {&params.linear, &params.put_off}) *each *= linear;
  for (double* each :
       {&params.attention, &params.piece, &params.ring_step, &params.kv_intra, &params.kv_domain,
        &params.kv_inter, &params.latency_intra, &params.latency_domain, &params.latency_inter,
        &memory.kept_copy, &memory.kept_back}) {
    *each *= attention;
  }
  for (double* each : {&params.fixed, &memory.copy}) *each *= fixed;
  return {params, memory, cluster};
}

// The fastest rank gets speed 1, and the costs are those of it.
void CostModel::normaliseSpeeds() {
  std::vector<double>& speeds = cluster_.speeds;
  const double fastest = speeds.empty() ? 1 : *std::max_element(speeds.begin(), speeds.end());
  if (fastest == 1) return;
  for (double& speed : speeds) speed /= fastest;
  CostParams& all = params_;
  for (double* seconds :
       {&all.attention, &all.piece, &all.linear, &all.fixed, &all.ring_step, &all.kv_intra,
        &all.kv_domain, &all.kv_inter, &all.latency_intra, &all.latency_domain, &all.latency_inter,
        &all.put_off, &memory_.copy, &memory_.kept_copy, &memory_.kept_back}) {
    *seconds /= fastest;
  }
}

double CostModel::maxOffload(const Load& load) const noexcept {
  if (memory_.copy <= 0 || memory_.offloadable <= 0 || load.tokens <= 0) return 0;
  const double forward = params_.forward * computeSeconds(load, 1);
  return std::min(1.0, forward / (memory_.copy * load.tokens));
}

double CostModel::offloadFor(double tokens) const noexcept {
  const double capacity = static_cast<double>(memory_.capacity);
  if (tokens <= capacity) return 0;
  if (memory_.offloadable <= 0) return std::numeric_limits<double>::infinity();
  return (1 - capacity / tokens) / memory_.offloadable;
}

int64_t CostModel::tokenLimit(double ratio) const noexcept {
  if (ratio <= 0) return memory_.capacity;
  const double capacity = static_cast<double>(memory_.capacity);
  const double limit =
      std::min(capacity / (1 - ratio * memory_.offloadable), capacity + memory_.host_tokens);
  // The small addition makes up for the rounding of a ratio that offloadFor() gave.
  return static_cast<int64_t>(limit + 1e-6);
}

int CostModel::minRanks(const Load& sequence) const noexcept {
  const auto length = static_cast<int64_t>(sequence.tokens);
  const int64_t limit = tokenLimit(length > memory_.capacity ? maxOffload(sequence) : 0.0);
  const int64_t size = (length + limit - 1) / limit;
  return static_cast<int>(std::min<int64_t>(size, std::numeric_limits<int>::max()));
}

// The time is quasi-convex in the group size, inside a node, inside a domain and beyond it
// (docs/bound.md), so bisection on the slope finds its minimum.
int CostModel::fastestIn(const Load& load, int first, int last) const noexcept {
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (seconds(load, middle + 1) < seconds(load, middle)) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

int CostModel::fastestSize(const Load& load, int min_size) const noexcept {
  int best = min_size;
  int first = min_size;
  for (const int last : cluster_.largestGroups()) {
    if (first > last) continue;
    const int fastest = fastestIn(load, first, last);
    if (first == min_size || seconds(load, fastest) < seconds(load, best)) best = fastest;
    first = last + 1;
  }
  return best;
}

int CostModel::searchWithin(const Load& load, int first, int last, double limit) const noexcept {
  if (first > last) return 0;
  double slow = seconds(load, first);
  if (slow <= limit) return first;
  // In growing steps, until a size is fast enough or the fastest one is passed.
  int low = first;  // too slow, and in the end `high` is fast enough
  int high = first;
  for (int step = 1;; step *= 2) {
    const int next = std::min(last, high + step);
    const double found = seconds(load, next);
    if (found > limit && (found >= slow || next == last)) {
      high = fastestIn(load, low, next);
      if (seconds(load, high) > limit) return 0;
      break;
    }
    low = high;
    high = next;
    if (found <= limit) break;
    slow = found;
  }
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (seconds(load, middle) <= limit ? high : low) = middle;
  }
  return high;
}

int CostModel::sizeWithin(const Load& load, int min_size, int max_size,
                          double limit) const noexcept {
  int first = min_size;
  for (const int last : cluster_.largestGroups()) {
    const int size = searchWithin(load, first, std::min(last, max_size), limit);
    if (size > 0) return size;
    first = std::max(first, last + 1);
  }
  return 0;
}

}  // namespace hdpcomm::planner
