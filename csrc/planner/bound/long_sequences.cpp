#include "planner/bound/long_sequences.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hdpcomm::planner {

LongSequences::LongSequences(const Problem& problem)
    : cost_(problem.cost()), ranks_(problem.ranks()) {
  loads.reserve(problem.count());
  for (const int32_t sequence : problem.byLength()) loads.push_back(problem.own(sequence));
}

bool LongSequences::choose(size_t count) {
  classes.clear();
  together.clear();
  const double longest = loads.front().tokens;
  const double shortest = loads[count - 1].tokens;
  const double ratio = std::pow(longest / shortest, 1.0 / kMaxClasses) * (1 + 1e-12);
  for (size_t begin = 0; begin < count;) {
    size_t end = begin + 1;
    while (end < count && loads[end].tokens * ratio >= loads[begin].tokens) ++end;
    classes.push_back({loads[end - 1], static_cast<double>(end - begin), {}, 0});
    begin = end;
  }
  others_work = 0;
  densest = 0;
  growth_ = 1;
  least_share = most_share = cost_.params().forward;
  for (size_t i = count; i < loads.size(); ++i) others_work += work(loads[i]);
  if (count < loads.size()) densest = work(loads[count]) / loads[count].tokens;
  longest_other_ = count < loads.size() ? loads[count].tokens : 0;
  shortest_other_ = count < loads.size() ? loads.back().tokens : 0;
  least = kForever;
  for (Class& each : classes) {
    each.sizes = sizesOf(each.load);
    if (each.sizes.empty()) return false;
    noteLeast(each.sizes);
  }
  findTogether();
  others_work *= growth_;
  return true;
}

double LongSequences::price(const Class& each, double wanted) {
  const auto fits =
      std::partition_point(each.sizes.begin(), each.sizes.end(),
                           [&](const Size& size) { return size.passes.seconds() > wanted; });
  if (fits == each.sizes.begin()) return fits->ranks * fits->passes.seconds();
  if (fits == each.sizes.end()) return (fits - 1)->ranks * (fits - 1)->passes.seconds();
  const Size& slow = *(fits - 1);
  const double part =
      (slow.passes.seconds() - wanted) / (slow.passes.seconds() - fits->passes.seconds());
  return wanted * (slow.ranks + part * (fits->ranks - slow.ranks));
}

double LongSequences::slopeOn(int size) const {
  double most = 0;
  for (const Class& each : classes) {
    most = std::max(most, each.gain / (size * cost_.computeSeconds(each.load, size)));
  }
  return most;
}

LongSequences::Passes LongSequences::passesOf(const Load& load, int size) const {
  const CostParams& params = cost_.params();
  const double compute = cost_.stepCompute(load, size);
  double rest = size * compute + params.linear * load.tokens / size + params.fixed;
  Passes passes;
  if (size > 1) {
    const double transfer = cost_.stepTransfer(load, size, cost_.cluster().leastScope(size));
    rest += (size - 1) * params.ring_step;
    passes.forward = (size - 1) * cost_.forwardWait(compute, transfer);
    passes.backward = (size - 1) * cost_.backwardWait(compute, transfer);
  }
  passes.forward += params.forward * rest;
  passes.backward += (1 - params.forward) * rest;
  return passes;
}

std::vector<LongSequences::Size> LongSequences::sizesOf(const Load& load) {
  std::vector<Size> sizes;
  Passes best{kForever, kForever};
  double both = kForever;
  for (int size = leastRanks(load.tokens); size <= ranks_;) {
    const int last = std::min(ranks_, size + std::max(0, (size - kOneByOne) / 64));
    // Rank-seconds do not fall with the number of ranks.
    for (int ranks = size; ranks <= last; ++ranks) grow(load, ranks);
    Passes passes = passesOf(load, size);
    const double part = static_cast<double>(size) / last;
    passes = {part * passes.forward, part * passes.backward};
    if (passes.forward < best.forward || passes.backward < best.backward ||
        passes.seconds() < both) {
      sizes.push_back({size, passes});
      best = {std::min(best.forward, passes.forward), std::min(best.backward, passes.backward)};
      both = std::min(both, passes.seconds());
      const double share = passes.forward / passes.seconds();
      least_share = std::min(least_share, share);
      most_share = std::max(most_share, share);
    }
    size = last + 1;
  }
  return sizes;
}

double LongSequences::work(const Load& load) const {
  const CostParams& params = cost_.params();
  return params.attention * load.squares + (params.piece + params.linear) * load.tokens;
}

int LongSequences::leastRanks(double tokens) const {
  return std::max(1, static_cast<int>(std::ceil(tokens / held * (1 - 1e-9))));
}

void LongSequences::noteLeast(const std::vector<Size>& sizes) {
  for (const Size& size : sizes) least = std::min(least, size.passes.seconds());
}

void LongSequences::grow(const Load& load, int size) {
  if (longest_other_ <= 0 || size == 1) return;
  const CostParams& params = cost_.params();
  const Scope scope = cost_.cluster().leastScope(size);
  const double compute = cost_.stepCompute(load, size);
  const double transfer = cost_.stepTransfer(load, size, scope);
  const double kv = cost_.kv(scope);
  for (const bool backward : {false, true}) {
    const double own = backward ? 1 - params.forward : params.forward;
    const double theirs = backward ? 1 - params.forward_transfer : params.forward_transfer;
    if (own * compute >= theirs * transfer) continue;
    for (const double other : {longest_other_, shortest_other_}) {
      const double step = own * (params.attention * other / size + params.piece);
      const double added = own * params.linear + step + (size - 1) * std::min(step, theirs * kv);
      const double alone = own * (params.attention * other + params.piece + params.linear);
      growth_ = std::min(growth_, added / alone);
    }
  }
}

void LongSequences::findTogether() {
  const double tokens = classes.back().load.tokens;
  const double squares = classes.back().load.squares;
  for (int number = 2; number <= kMaxTogether + 1; ++number) {
    if (number * tokens > held * ranks_ * (1 + 1e-9)) break;
    const std::vector<Size> sizes = sizesOf({number * squares, number * tokens});
    noteLeast(sizes);
    for (const Size& size : sizes) together.push_back({number, size.ranks, size.passes});
  }
}

}  // namespace hdpcomm::planner
