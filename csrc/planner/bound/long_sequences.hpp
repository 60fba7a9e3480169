// The sequences of a step that a lower bound takes one by one, in classes of about equal length,
// and what the passes of their micro-batches take (docs/bound.md, claim 15).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class LongSequences {
 public:
  struct Passes {
    double forward = 0;
    double backward = 0;
    double seconds() const { return forward + backward; }
  };
  struct Size {
    int ranks = 1;
    Passes passes;
  };
  struct Class {
    Load load;  // of its shortest sequence
    double count = 0;
    std::vector<Size> sizes;  // more ranks, less time
    double gain = 0;
  };
  struct Together {
    int number = 2;  // of sequences, each as long as the shortest one
    int ranks = 1;
    Passes passes;
  };

  static constexpr int kMaxTogether = 16;

  explicit LongSequences(const Problem& problem) : cost_(problem.cost()), ranks_(problem.ranks()) {
    for (const int32_t sequence : problem.byLength()) loads.push_back(problem.own(sequence));
  }

  // Makes classes of the `count` longest sequences. False if they cannot be held.
  bool choose(size_t count) {
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

  // Rank-seconds of a sequence in a micro-batch that takes about this long.
  static double price(const Class& each, double wanted) {
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

  // The most weight for a second of compute on so many ranks.
  double slopeOn(int size) const {
    double most = 0;
    for (const Class& each : classes) {
      most = std::max(most, each.gain / (size * cost_.computeSeconds(each.load, size)));
    }
    return most;
  }

  std::vector<Load> loads;     // of all sequences, by falling length
  double held = 1;             // most tokens of a micro-batch on a rank
  std::vector<Class> classes;  // of the long sequences, by falling length
  std::vector<Together> together;
  double least = 0;                        // seconds of a micro-batch with one of them
  double others_work = 0;                  // rank-seconds of the others
  double densest = 0;                      // most work of a token of these
  double least_share = 0, most_share = 1;  // of forward passes

 private:
  static constexpr int kMaxClasses = 24;
  static constexpr int kOneByOne = 1024;  // ranks, above which sizes are taken together

  Passes passesOf(const Load& load, int size) const {
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

  // All numbers of ranks on which a pass ends earlier than on fewer ones.
  std::vector<Size> sizesOf(const Load& load) {
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

  // Rank-seconds of a sequence on one rank, without what each micro-batch costs.
  double work(const Load& load) const {
    const CostParams& params = cost_.params();
    return params.attention * load.squares + (params.piece + params.linear) * load.tokens;
  }

  int leastRanks(double tokens) const {
    return std::max(1, static_cast<int>(std::ceil(tokens / held * (1 - 1e-9))));
  }

  void noteLeast(const std::vector<Size>& sizes) {
    for (const Size& size : sizes) least = std::min(least, size.passes.seconds());
  }

  // How much of their work the other sequences add to a micro-batch of a long one, at least: where
  // it waits for messages they may add those only.
  void grow(const Load& load, int size) {
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

  // Micro-batches of several of the long sequences.
  void findTogether() {
    const double tokens = classes.back().load.tokens;
    const double squares = classes.back().load.squares;
    for (int number = 2; number <= kMaxTogether + 1; ++number) {
      if (number * tokens > held * ranks_ * (1 + 1e-9)) break;
      const std::vector<Size> sizes = sizesOf({number * squares, number * tokens});
      noteLeast(sizes);
      for (const Size& size : sizes) together.push_back({number, size.ranks, size.passes});
    }
  }

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const CostModel& cost_;
  const int ranks_;
  double longest_other_ = 0, shortest_other_ = 0;
  double growth_ = 1;
};

}  // namespace hdpcomm::planner
