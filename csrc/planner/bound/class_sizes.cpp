#include "planner/bound/class_sizes.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace hdpcomm::planner {

ClassSizes::ClassSizes(const Problem& problem, double share)
    : cost_(problem.cost()), ranks_(problem.ranks()), stages_(cost_.cluster().pipeline) {
  const std::vector<int64_t>& lengths = problem.lengths();
  const auto longest = *std::max_element(lengths.begin(), lengths.end());
  std::vector<Load> alike;
  for (int i = 0; i < problem.count(); ++i) {
    const Load load = problem.own(i);
    if (load.tokens >= share * static_cast<double>(longest)) {
      alike.push_back(load);
      continue;
    }
    if (others_.tokens == 0) shortest_other_ = load;
    if (load.tokens > longest_other_.tokens) longest_other_ = load;
    if (load.tokens < shortest_other_.tokens) shortest_other_ = load;
    others_ += load;
  }
  std::sort(alike.begin(), alike.end(),
            [](const Load& a, const Load& b) { return a.tokens > b.tokens; });
  shortest_ = alike.back();
  // Classes of about equal numbers, each with the shortest length of its own.
  const size_t most = stages_ == 1         ? kMaxClasses
                      : others_.tokens > 0 ? kMaxClasses / 2
                                           : 2 * kMaxClasses;
  const size_t size = (alike.size() + most - 1) / most;
  for (size_t begin = 0; begin < alike.size();) {
    size_t end = std::min(alike.size(), begin + size);
    while (end < alike.size() && alike[end].tokens == alike[end - 1].tokens) ++end;
    classes_.push_back({alike[end - 1], static_cast<double>(end - begin), {}, 0, {}});
    begin = end;
  }
  count_ = static_cast<double>(alike.size());
  equal_ = alike.front().tokens == alike.back().tokens;
}

bool ClassSizes::find(double time, const ConfigurationCharges& charges) {
  held_ = charges.held;
  const std::pair<double, double> rooms{charges.held, charges.sequence};
  for (Class& each : classes_) {
    if (rooms != rooms_) each.jobs.clear();
  }
  rooms_ = rooms;
  for (Class& each : classes_) {
    findOf(each, time, charges);
    if (each.sizes.empty()) return false;
  }
  return true;
}

double ClassSizes::othersWork() const { return hasOthers() ? leastWork(others_, held_) : 0; }

double ClassSizes::othersHeld() const {
  if (!hasOthers()) return 0;
  return leastWork(longest_other_, held_) / longest_other_.tokens * stages_ * held_;  // the densest
}

double ClassSizes::leastWork(const Load& load, double held) const {
  const CostParams& params = cost_.params();
  return params.attention * load.squares + (params.piece + params.linear) * load.tokens +
         params.fixed * load.tokens / held;
}

void ClassSizes::findOf(Class& each, double time, const ConfigurationCharges& charges) {
  each.sizes.clear();
  constexpr double never = std::numeric_limits<double>::infinity();
  each.work = never;
  const double tokens = each.load.tokens;
  const auto least = static_cast<int>(std::ceil(tokens / charges.sequence * (1 - 1e-9)));
  const auto borders = cost_.cluster().largestGroups();
  size_t range = 0;
  for (int first = std::max(least, 1); first <= ranks_;) {
    int last = first + std::max(0, (first - std::max(64, 2 * least)) / 32);
    for (const int border : borders) {
      if (first <= border) last = std::min(last, border);
    }
    last = std::min(last, ranks_);
    double seconds = cost_.leastSeconds(each.load, first, last);
    const int most = mostTogether(each.load, first, last, charges.held);
    const auto add = [&](double taken, int together, const WayLists::Ends& ends) {
      if (taken > time || taken + ends.only > time) return;
      each.sizes.push_back({first, last, taken, together, ends});
      each.work = std::min(each.work, first * taken / together);
    };
    if (stages_ > 1) {
      if (each.jobs.size() == range) {
        const auto least_job = PassTimes::leastInSlices(cost_, each.load, first, last);
        // More ranks than another one that ends no later are in no list.
        const bool worse =
            std::any_of(each.jobs.begin(), each.jobs.end(),
                        [&](const PassTimes::Job& fewer) { return fewer.noLongerThan(least_job); });
        each.jobs.push_back(worse
                                ? PassTimes::Job{never, never, never, never}
                                : PassTimes::inSlices(cost_, each.load, first, last, charges.held));
      }
      const PassTimes::Job& job = each.jobs[range++];
      add(job.passes, 1, {job.first - job.passes, job.last - job.passes, job.only - job.passes});
    } else if (most > 0) {
      add(seconds, 1, {});
    }
    for (int together = 2; together <= most && seconds <= time; ++together) {
      const Load load{each.load.squares * together, tokens * together};
      seconds = cost_.seconds(load, first);
      add(seconds, together, waysOfWhole(load, first, last));
    }
    if (most == 0) {  // with others, whose work its waiting may hide
      Load load = each.load;
      if (!othersMayHide(load, first, last, charges.held)) load += shortest_;
      add(std::min(seconds, charges.work(each.load, first) / last), 1,
          waysOfWhole(load, first, last));
    }
    first = last + 1;
  }
}

WayLists::Ends ClassSizes::waysOfWhole(const Load& load, int first, int last) const {
  if (stages_ == 1) return {};
  const CostParams& params = cost_.params();
  const double all =
      cost_.computeSeconds(load, last) + params.fixed + (first - 1) * params.ring_step;
  const auto way = [&](double share, bool backward) {
    const double keys = PassTimes::longest(cost_, load, first, last, backward);
    return (stages_ - 1) * std::max(share * all, keys);
  };
  const double down = way(params.forward, false);
  const double back = way(1 - params.forward, true);
  return {down, back, down + back};
}

int ClassSizes::mostTogether(const Load& load, int first, int last, double held) const {
  if (alone(load, first, last, held)) return 1;
  if (!equal_ || last > kMaxPackRanks || first != last) return 0;
  if (others_.tokens > 0 &&
      !(addsItsWork(shortest_other_, first, held) && addsItsWork(longest_other_, first, held))) {
    return 0;
  }
  const double most = std::floor(first * held / load.tokens * (1 + 1e-9));
  return most <= kMaxTogether ? static_cast<int>(most) : 0;
}

bool ClassSizes::alone(const Load& load, int first, int last, double held) const {
  const double room = last * held - load.tokens;
  return room < shortest_.tokens * (1 - 1e-9) && !othersMayHide(load, first, last, held);
}

bool ClassSizes::othersMayHide(const Load& load, int first, int last, double held) const {
  const double room = last * held - load.tokens;
  if (others_.tokens == 0 || room < shortest_other_.tokens * (1 - 1e-9)) return false;
  return first != last || !addsItsWork(shortest_other_, first, held) ||
         !addsItsWork(longest_other_, first, held);
}

bool ClassSizes::addsItsWork(const Load& other, int size, double held) const {
  const CostParams& params = cost_.params();
  const double compute = params.attention * other.tokens / size + params.piece;
  const double transfer = cost_.kv(cost_.cluster().leastScope(size));
  double added = params.linear;
  const auto pass = [&](double compute_share, double transfer_share) {
    const double own = compute_share * compute;
    added += own + (size - 1) * std::min(own, transfer_share * transfer);
  };
  pass(params.forward, params.forward_transfer);
  pass(1 - params.forward, 1 - params.forward_transfer);
  return added * other.tokens >=
         leastWork({other.tokens * other.tokens, other.tokens}, held) * (1 - 1e-12);
}

}  // namespace hdpcomm::planner
