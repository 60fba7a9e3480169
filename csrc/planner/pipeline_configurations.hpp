// Part of the lower bound for pipelines (docs/planner.md, claim 15): which micro-batches a rank can
// run within a time when what 1F1B leaves idle around them counts, too. These are whole numbers,
// which counts where the longest sequences are of about the same length. Each sequence gets a
// weight; any weights give a bound, so a few are tried.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "planner/pipeline_ramps.hpp"
#include "planner/plan.hpp"

namespace hdpcomm::planner {

class PipelineConfigurations {
 public:
  // `shortest`: least seconds of compute of any micro-batch.
  PipelineConfigurations(const Problem& problem, double shortest)
      : cost_(problem.cost()),
        stages_(cost_.cluster().pipeline),
        ranks_(problem.ranks()),
        shortest_(shortest) {
    for (const int32_t sequence : problem.byLength()) loads_.push_back(problem.own(sequence));
  }

  // The largest time, from `low` on, that is proved to be too short; `low` if none is. `held`: most
  // tokens of a micro-batch on a rank in plans that end within a time.
  double improve(double low, const std::function<double(double)>& held) {
    held_ = held(low * kMostGain);
    size_t before = 0;
    const double top = low * kMostGain;
    for (const double part : {0.75, 0.35, 0.12}) {
      const double least = part * loads_.front().tokens;
      const size_t count =
          std::partition_point(loads_.begin(), loads_.end(),
                               [&](const Load& load) { return load.tokens >= least; }) -
          loads_.begin();
      if (count == before) continue;
      before = count;
      if (!choose(count)) break;
      for (const double beside : {0.0, 1.5, 4.0, 10.0}) {
        for (const double times : {1.0, 1.25, 1.6, 2.2}) {
          if (others_work_ <= 0 && times > 1) break;
          low = raise(low, top, beside, times);
        }
      }
    }
    return low;
  }

 private:
  static constexpr double kMostGain = 1.4;
  static constexpr double kStep = 1.004;  // of the times that are tried
  static constexpr int kCells = 1024;     // of the longest possible micro-batch
  static constexpr int kMaxClasses = 24;
  static constexpr int kMaxTogether = 16;
  static constexpr int kPieces = 4;
  static constexpr int kMost = 96;  // micro-batches of long sequences on a rank
  static constexpr int kLevels = 64;
  static constexpr int kOneByOne = 1024;  // ranks, above which sizes are taken together
  static constexpr int kBoxes = 250;
  static constexpr double kLeaf = 1 / 256.;  // of the time
  static constexpr std::array<double, 9> kPrices = {0, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5};

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
  struct Box {
    double low = 0, high = 0;   // idle seconds of a rank
    double less = 0, more = 0;  // of these and what other sequences run in them
  };

  Passes passesOf(const Load& load, int size) const {
    const CostParams& params = cost_.params();
    const double compute = cost_.stepCompute(load, size);
    double rest = size * compute + params.linear * load.tokens / size + params.fixed;
    Passes passes;
    if (size > 1) {
      const bool one_node = size <= cost_.cluster().ranks_per_node;
      const double transfer = cost_.stepTransfer(load, size, one_node);
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
        least_share_ = std::min(least_share_, share);
        most_share_ = std::max(most_share_, share);
      }
      size = last + 1;
    }
    return sizes;
  }

  // Makes classes of the `count` longest sequences. False if they cannot be held.
  bool choose(size_t count) {
    classes_.clear();
    together_.clear();
    const double longest = loads_.front().tokens;
    const double shortest = loads_[count - 1].tokens;
    const double ratio = std::pow(longest / shortest, 1.0 / kMaxClasses) * (1 + 1e-12);
    for (size_t begin = 0; begin < count;) {
      size_t end = begin + 1;
      while (end < count && loads_[end].tokens * ratio >= loads_[begin].tokens) ++end;
      classes_.push_back({loads_[end - 1], static_cast<double>(end - begin), {}, 0});
      begin = end;
    }
    others_work_ = 0;
    densest_ = 0;
    growth_ = 1;
    least_share_ = most_share_ = cost_.params().forward;
    for (size_t i = count; i < loads_.size(); ++i) others_work_ += work(loads_[i]);
    if (count < loads_.size()) densest_ = work(loads_[count]) / loads_[count].tokens;
    longest_other_ = count < loads_.size() ? loads_[count].tokens : 0;
    shortest_other_ = count < loads_.size() ? loads_.back().tokens : 0;
    least_ = kForever;
    for (Class& each : classes_) {
      each.sizes = sizesOf(each.load);
      if (each.sizes.empty()) return false;
      noteLeast(each.sizes);
    }
    findTogether();
    others_work_ *= growth_;
    ramps_.emplace(cost_, least_share_, most_share_, shortest_);
    return true;
  }

  // Rank-seconds of a sequence on one rank, without what each micro-batch costs.
  double work(const Load& load) const {
    const CostParams& params = cost_.params();
    return params.attention * load.squares + (params.piece + params.linear) * load.tokens;
  }

  int leastRanks(double tokens) const {
    return std::max(1, static_cast<int>(std::ceil(tokens / held_ * (1 - 1e-9))));
  }

  void noteLeast(const std::vector<Size>& sizes) {
    for (const Size& size : sizes) least_ = std::min(least_, size.passes.seconds());
  }

  // How much of their work the other sequences add to a micro-batch of a long one, at least: where
  // it waits for messages they may add those only.
  void grow(const Load& load, int size) {
    if (longest_other_ <= 0 || size == 1) return;
    const CostParams& params = cost_.params();
    const bool one_node = size <= cost_.cluster().ranks_per_node;
    const double compute = cost_.stepCompute(load, size);
    const double transfer = cost_.stepTransfer(load, size, one_node);
    const double kv = one_node ? params.kv_intra : params.kv_inter;
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
    const double tokens = classes_.back().load.tokens;
    const double squares = classes_.back().load.squares;
    for (int number = 2; number <= kMaxTogether + 1; ++number) {
      if (number * tokens > held_ * ranks_ * (1 + 1e-9)) break;
      const std::vector<Size> sizes = sizesOf({number * squares, number * tokens});
      noteLeast(sizes);
      for (const Size& size : sizes) together_.push_back({number, size.ranks, size.passes});
    }
  }

  // Raises `low` as far as these weights prove.
  double raise(double low, double top, double beside, double times) {
    if (!tooShort(low * kStep, beside, times)) return low;
    double step = kStep;
    double high = low * step;
    do {
      low = high;
      step *= step;
      high = low * step;
    } while (high < top && tooShort(high, beside, times));
    high = std::min(high, top);
    while (high > low * kStep) {
      const double middle = 0.5 * (low + high);
      (tooShort(middle, beside, times) ? low : high) = middle;
    }
    return low;
  }

  // Whether the weights of all sequences are more than all ranks can get within the time. The long
  // ones weigh as if their micro-batches took a share of the time, `beside` others after each
  // other.
  bool tooShort(double time, double beside, double times) {
    const double longest = time / stages_;
    most_ = static_cast<int>(std::min(time / least_ + 1e-9, 1e6));
    if (most_ > kMost) return false;
    double all = others_work_;
    for (Class& each : classes_) {
      each.gain = times * price(each, time / (stages_ + beside));
      all += each.gain * each.count;
    }
    needed_ = all / ranks_ * (1 - 1e-9);
    time_ = time;
    other_s_ = 0;
    if (others_work_ > 0) other_s_ = cost_.params().fixed + densest_ * held_;
    fillTables(longest);
    // What was possible with other weights may be possible with these.
    if (found_.high > 0) {
      const Box box{found_.low * time, found_.high * time, found_.less * time, found_.more * time};
      if (most(box) >= needed_) return false;
    }
    boxes_ = 0;
    const double others = (stages_ - 1) * other_s_;
    return !mayFit({0, time, 0, time + others});
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

  // The most that the ranks of a micro-batch get beyond the price of its time, by the length of its
  // forward and of its backward pass.
  void fillTables(double longest) {
    cell_ = longest / kCells;
    for (auto* tables : {&forward_, &backward_}) {
      for (std::vector<double>& table : *tables) table.assign(kCells + 1, -kForever);
    }
    const auto cellOf = [&](double seconds) {
      return std::min(kCells, static_cast<int>(seconds / cell_ * (1 - 1e-9)));
    };
    const auto note = [&](const Passes& passes, double seconds, double gain) {
      if (seconds > longest * (1 + 1e-9)) return;
      const int forward = cellOf(passes.forward);
      const int backward = cellOf(passes.backward);
      for (size_t price = 0; price < kPrices.size(); ++price) {
        const double value = gain - kPrices[price] * seconds;
        forward_[price][forward] = std::max(forward_[price][forward], value);
        backward_[price][backward] = std::max(backward_[price][backward], value);
      }
    };
    double most = 0;
    for (const Class& each : classes_) {
      most = std::max(most, each.gain);
      for (const Size& size : each.sizes)
        note(size.passes, size.passes.seconds(), each.gain / size.ranks);
    }
    for (const Together& group : together_) {
      // What they gain is limited by their number, and by their compute.
      const double slope = slopeOn(group.ranks);
      const bool more = group.number > kMaxTogether;
      const double limit = more ? slope * longest : group.number * most / group.ranks;
      const double first = group.passes.seconds();
      const double span = std::max(0.0, limit / slope - first);
      for (int piece = 0; piece < kPieces; ++piece) {
        const double from = first + span * piece / kPieces;
        const double last = first + span * (piece + 1) / kPieces;
        note(group.passes, from, std::min(limit, slope * last));
        if (span == 0) break;
      }
    }
    for (auto* tables : {&forward_, &backward_}) {
      for (std::vector<double>& table : *tables) {
        for (int cell = 1; cell <= kCells; ++cell) {
          table[cell] = std::max(table[cell], table[cell - 1]);
        }
      }
    }
  }

  // The most weight for a second of compute on so many ranks.
  double slopeOn(int size) const {
    double most = 0;
    for (const Class& each : classes_) {
      most = std::max(most, each.gain / (size * cost_.computeSeconds(each.load, size)));
    }
    return most;
  }

  // Whether a rank may get its share of all weights with idle seconds from this box. Tests what can
  // only be wrong by taking the better end for each term, and halves what passes.
  bool mayFit(const Box& box) {
    if (++boxes_ > kBoxes) return true;
    if (most(box) < needed_) return false;
    const double width = box.high - box.low;
    const double height = others_work_ > 0 ? box.more - box.less : 0;
    if (std::max(width, height) <= kLeaf * time_) {
      found_ = {box.low / time_, box.high / time_, box.less / time_, box.more / time_};
      return true;
    }
    Box first = box, second = box;
    if (width >= height) {
      first.high = second.low = 0.5 * (box.low + box.high);
    } else {
      first.more = second.less = 0.5 * (box.less + box.more);
    }
    return mayFit(second) || mayFit(first);
  }

  double most(const Box& box) {
    const double others = stages_ - 1;
    const double share = cost_.params().forward;
    const double large = std::max(share, 1 - share);
    double hidden = 0;  // of other sequences
    double reach = box.high;
    if (others_work_ > 0) {
      // What they hide at most, and how long they are for what they have to hide.
      const double full = others * other_s_;
      if (box.more < box.low || box.less > box.high + full) return 0;
      const double wanted = std::max(0.0, box.less - box.high);
      hidden =
          wanted <= large * full ? wanted / large : full + (wanted - large * full) / (1 - large);
      // The work in it, without what each of these micro-batches costs.
      hidden = std::max(0.0, hidden - 2 * others * cost_.params().fixed);
      reach = box.more;
    }
    const double busy = ramps_->mostWork(time_);
    const double fixed = cost_.params().fixed;
    const double price = others_work_ > 0 ? 1 : 0;  // of the other sequences
    double best = price * std::min(time_ - box.low, busy);
    const auto highest_forward = static_cast<int>(cellAt(longestPass(most_share_, box.high)));
    const auto highest_backward = static_cast<int>(cellAt(longestPass(1 - least_share_, box.high)));
    std::array<double, kPrices.size()> highest;
    for (size_t k = 0; k < kPrices.size(); ++k) {
      highest[k] = std::min(forward_[k][highest_forward], backward_[k][highest_backward]);
    }
    for (int count = 1; count <= most_ && best < needed_; ++count) {
      const double room = std::min(time_ - box.low, busy + count * fixed);
      if (room < hidden + count * least_ * (1 - 1e-9)) break;
      double found = kForever;
      const auto flat = [&](size_t k) { return kPrices[k] * (room - hidden) + price * hidden; };
      for (size_t k = kPrices.size(); k-- > 0 && kPrices[k] >= price;) {
        found = std::min(found, flat(k) + count * highest[k]);
      }
      // The price that showed it last time first.
      for (size_t i = 0; i < kPrices.size() && found >= needed_; ++i) {
        const size_t k = i == 0 ? first_price_ : i - (i <= first_price_ ? 1 : 0);
        if (kPrices[k] < price) continue;
        found = std::min(found, flat(k) + onPath(count, k, reach, box.high));
        if (found < needed_) first_price_ = k;
      }
      best = std::max(best, found);
    }
    return best;
  }

  double longestPass(double share, double idle) const { return idle * ramps_->highest() * share; }

  // Where in a table the passes are that end within these seconds, as a fraction.
  double cellAt(double seconds) const {
    return std::min(static_cast<double>(kCells), seconds / cell_ * (1 + 1e-9));
  }

  // The most that `count` micro-batches of a rank get beyond the price of their times. `reach` idle
  // seconds are for the way of the first ones down the stages, a part that never falls from one
  // micro-batch to the next, and for the way of the last ones back.
  double onPath(int count, size_t price, double reach, double idle) const {
    const std::vector<double>& forward = forward_[price];
    const std::vector<double>& backward = backward_[price];
    const double highest_forward = cellAt(longestPass(most_share_, idle));
    const double highest_backward = cellAt(longestPass(1 - least_share_, idle));
    std::array<double, kLevels> gains{};
    for (int i = 0; i < count; ++i) {
      const double up = cellAt(ramps_->rising(i) * least_share_ * reach / kLevels);
      const double down =
          cellAt(ramps_->falling(count - 1 - i) * (1 - most_share_) * reach / kLevels);
      double before = -kForever;
      for (int level = 0; level < kLevels; ++level) {
        before = std::max(before, gains[level]);
        const double f = std::min(up * (level + 1), highest_forward);
        const double b = std::min(down * (kLevels - level), highest_backward);
        gains[level] =
            before + std::min(forward[static_cast<int>(f)], backward[static_cast<int>(b)]);
      }
    }
    return *std::max_element(gains.begin(), gains.end());
  }

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const CostModel& cost_;
  const int stages_;
  const int ranks_;
  const double shortest_;
  std::vector<Load> loads_;  // by falling length
  double held_ = 1;
  std::vector<Class> classes_;  // of the long sequences, by falling length
  std::vector<Together> together_;
  double least_ = 0;        // seconds of a micro-batch with one of them
  double others_work_ = 0;  // of the others
  double densest_ = 0;      // most work of a token of these
  double longest_other_ = 0, shortest_other_ = 0;
  double growth_ = 1;
  double least_share_ = 0, most_share_ = 1;  // of forward passes
  std::optional<PipelineRamps> ramps_;
  // Of one time and one choice of weights:
  double time_ = 0;
  double needed_ = 0;   // by a rank
  double other_s_ = 0;  // most seconds of a micro-batch without long ones
  int most_ = 0;        // micro-batches with long ones on a rank
  double cell_ = 0;
  int boxes_ = 0;
  Box found_;  // the last one that was not ruled out, in shares of the time
  size_t first_price_ = 3;
  std::array<std::vector<double>, kPrices.size()> forward_, backward_;  // by price, by cell
};

}  // namespace hdpcomm::planner
