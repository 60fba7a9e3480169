// Part of the lower bound (docs/planner.md, claims 12 and 13): which sequences a rank can run one
// after the other within a time, and which ones the ranks can run side by side. Both are whole
// numbers, which counts where the longest sequences are of about the same length. Each sequence
// gets a weight; any weights give a bound, so a few are tried.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "planner/plan.hpp"

namespace hdpcomm::planner {

class Configurations {
 public:
  // What is known of plans that end within a time.
  struct Charges {
    double held = 1;  // most tokens of a micro-batch on a rank
    // Least rank-seconds of a sequence in a micro-batch on so many ranks, alone or with others.
    std::function<double(const Load&, int)> work;
  };

  explicit Configurations(const Problem& problem) : cost_(problem.cost()), ranks_(problem.ranks()) {
    const std::vector<int64_t>& lengths = problem.lengths();
    const auto longest = *std::max_element(lengths.begin(), lengths.end());
    std::vector<Load> alike;
    for (int i = 0; i < problem.count(); ++i) {
      const Load load = problem.own(i);
      if (load.tokens >= kAboutAsLong * static_cast<double>(longest)) {
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
    const size_t size = (alike.size() + kMaxClasses - 1) / kMaxClasses;
    for (size_t begin = 0; begin < alike.size();) {
      size_t end = std::min(alike.size(), begin + size);
      while (end < alike.size() && alike[end].tokens == alike[end - 1].tokens) ++end;
      classes_.push_back({alike[end - 1], static_cast<double>(end - begin), {}, 0});
      begin = end;
    }
    count_ = static_cast<double>(alike.size());
  }

  // The largest time, from `low` on, that is proved to be too short; `low` if none is.
  double improve(double low, const std::function<Charges(double)>& charges) {
    std::vector<std::pair<double, Weights>> found;
    const double first = low * (1 + kLeastGain);
    if (!prepare(first, charges(first))) return low;
    for (const double clip : {1.0, 0.75, 0.5, 0.25}) {
      for (const double equal : {-0.5, 0.0, 1.0, 4.0}) {
        for (const double others : {1.0, 0.9, 0.75, 0.5}) {
          if (others_.tokens == 0 && others < 1) continue;
          if (classes_.size() == 1 && (clip < 1 || equal != 0)) continue;
          const Weights weights{clip, equal, others};
          const double excess = excessOf(first, weights);
          if (excess > 1 + 1e-9) found.push_back({-excess, weights});
        }
      }
    }
    if (found.empty()) return low;
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    if (found.size() > kKept) found.resize(kKept);
    low = first;
    double high = low * kMostGain;
    while (high - low > kLeastGain * low) {
      const double middle = 0.5 * (low + high);
      const bool prepared = prepare(middle, charges(middle));
      const bool too_short =
          prepared && std::any_of(found.begin(), found.end(), [&](const auto& each) {
            return excessOf(middle, each.second) > 1 + 1e-9;
          });
      (too_short ? low : high) = middle;
    }
    return low;
  }

 private:
  static constexpr double kAboutAsLong = 0.5;
  static constexpr size_t kMaxClasses = 64;
  static constexpr double kLeastShare = 0.3;  // of the work, for the long sequences to matter
  static constexpr int kCells = 4096;         // of the time
  static constexpr int kMaxSideBySide = 24;
  static constexpr int kMaxRanks = 512;  // the same, of the ranks
  static constexpr double kMaxStack = 40;
  static constexpr double kLeastGain = 5e-4;
  static constexpr double kMostGain = 1.5;
  static constexpr size_t kKept = 4;

  // How sequences are weighed: as those of the class at the share `clip` from the shortest one if
  // longer, by their work plus `equal` times the mean of it; the others by their work times this.
  struct Weights {
    double clip = 1;
    double equal = 0;
    double others = 1;
  };

  // From `first` to `last` ranks, at least so many seconds.
  struct Sizes {
    int first = 1;
    int last = 1;
    double seconds = 0;
  };

  struct Class {
    Load load;  // of its shortest sequence
    double count = 0;
    std::vector<Sizes> sizes;
    double work = 0;  // least rank-seconds
  };

  // Finds the sizes that each class may have. False if there is nothing to be gained.
  bool prepare(double time, const Charges& charges) {
    if (cost_.cluster().ranks < 2 || count_ < 2) return false;
    others_work_ = others_.tokens > 0 ? leastWork(others_, charges.held) : 0;
    double work = 0;
    for (Class& each : classes_) {
      findSizes(each, time, charges);
      if (each.sizes.empty()) return false;
      work += each.work * each.count;
    }
    mean_work_ = work / count_;
    const Class& shortest = classes_.back();
    return work >= kLeastShare * (work + others_work_) &&
           shortest.sizes.front().seconds * kMaxStack >= time;
  }

  double leastWork(const Load& load, double held) const {
    const CostParams& params = cost_.params();
    return params.attention * load.squares + (params.piece + params.linear) * load.tokens +
           params.fixed * load.tokens / held;
  }

  void findSizes(Class& each, double time, const Charges& charges) {
    each.sizes.clear();
    each.work = std::numeric_limits<double>::infinity();
    const double tokens = each.load.tokens;
    const auto least = static_cast<int>(std::ceil(tokens / charges.held * (1 - 1e-9)));
    const int node = cost_.cluster().ranks_per_node;
    const int fastest = cost_.fastestSize(each.load, std::min(least, ranks_));
    for (int first = std::max(least, 1); first <= ranks_;) {
      int last = first + std::max(0, (first - std::max(64, 2 * least)) / 32);
      if (first <= node) last = std::min(last, node);
      last = std::min(last, ranks_);
      double seconds = std::min(cost_.seconds(each.load, first), cost_.seconds(each.load, last));
      if (first < fastest && fastest < last) seconds = cost_.seconds(each.load, fastest);
      if (seconds <= time) {
        if (!alone(each.load, first, last, charges.held)) {
          seconds = std::min(seconds, charges.work(each.load, first) / last);
        }
        each.sizes.push_back({first, last, seconds});
        each.work = std::min(each.work, first * seconds);
      }
      first = last + 1;
    }
  }

  // Whether no other of the long sequences fits into its micro-batch, and a shorter one adds no
  // less than its own work to it.
  bool alone(const Load& load, int first, int last, double held) const {
    const double room = last * held - load.tokens;
    if (room >= shortest_.tokens * (1 - 1e-9)) return false;
    if (others_.tokens == 0 || room < shortest_other_.tokens * (1 - 1e-9)) return true;
    return first == last && addsItsWork(shortest_other_, first, held) &&
           addsItsWork(longest_other_, first, held);
  }

  bool addsItsWork(const Load& other, int size, double held) const {
    const CostParams& params = cost_.params();
    const double compute = params.attention * other.tokens / size + params.piece;
    const bool one_node = size <= cost_.cluster().ranks_per_node;
    const double transfer = one_node ? params.kv_intra : params.kv_inter;
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

  // The weights of all sequences over what the ranks can run within the time; above 1: too short.
  double excessOf(double time, const Weights& weights) {
    const auto clip = static_cast<size_t>((1 - weights.clip) * (classes_.size() - 1) + 0.5);
    const double least_work = classes_.back().work;
    double all = weights.others * others_work_;
    gains_.clear();
    for (size_t i = 0; i < classes_.size(); ++i) {
      const Class& each = classes_[i];
      const double work = classes_[std::max(i, clip)].work;
      const double gain = std::max(work + weights.equal * mean_work_, 0.1 * least_work);
      gains_.push_back(gain);
      all += gain * each.count;
    }
    const double fill = others_.tokens > 0 ? weights.others : 0;
    return std::max(all / (ranks_ * mostInTime(time, fill)), all / (time * mostSideBySide(fill)));
  }

  // The most weight that a rank gets within the time, for its share of each micro-batch.
  double mostInTime(double time, double fill) {
    const double cell = time / kCells;
    std::vector<double> best(kCells + 1, 0.0);  // by the cells that a micro-batch takes
    for (size_t i = 0; i < classes_.size(); ++i) {
      for (const Sizes& sizes : classes_[i].sizes) {
        const auto cells = static_cast<int>(sizes.seconds / cell * (1 - 1e-9));
        if (cells == 0) return std::numeric_limits<double>::infinity();
        if (cells <= kCells) best[cells] = std::max(best[cells], gains_[i] / sizes.first);
      }
    }
    std::vector<double> most(kCells + 1);
    for (int x = 0; x <= kCells; ++x) most[x] = fill * cell * x;
    double largest = 0;
    for (int cells = 1; cells <= kCells; ++cells) {
      if (best[cells] <= largest) continue;
      largest = best[cells];
      if (largest <= fill * cell * cells) continue;
      for (int begin = cells; begin <= kCells; begin += cells) {
        const int end = std::min(begin + cells, kCells + 1);
        const double* const from = most.data() + begin - cells;
        double* const to = most.data() + begin;
        for (int x = 0; x < end - begin; ++x) to[x] = std::max(to[x], from[x] + largest);
      }
    }
    return most[kCells];
  }

  // The most weight a second that the ranks get at any one time.
  double mostSideBySide(double fill) {
    const int least = classes_.back().sizes.front().first;
    if (least * kMaxSideBySide < ranks_ || ranks_ > kMaxRanks) {
      return std::numeric_limits<double>::infinity();
    }
    std::vector<double> best(ranks_ + 1, 0.0);  // by ranks
    for (size_t i = 0; i < classes_.size(); ++i) {
      for (const Sizes& sizes : classes_[i].sizes) {
        best[sizes.first] = std::max(best[sizes.first], gains_[i] / sizes.seconds);
      }
    }
    std::vector<double> most(ranks_ + 1);
    for (int x = 0; x <= ranks_; ++x) most[x] = fill * x;
    for (int x = least; x <= ranks_; ++x) {
      for (int size = least; size <= x; ++size) {
        most[x] = std::max(most[x], most[x - size] + best[size]);
      }
    }
    return most[ranks_];
  }

  const CostModel& cost_;
  const int ranks_;
  std::vector<Class> classes_;  // by falling length
  double count_ = 0;            // of the long sequences
  Load shortest_;               // of these
  Load others_;                 // sums over the shorter ones
  Load longest_other_, shortest_other_;
  double others_work_ = 0;
  double mean_work_ = 0;
  std::vector<double> gains_;  // of each class
};

}  // namespace hdpcomm::planner
