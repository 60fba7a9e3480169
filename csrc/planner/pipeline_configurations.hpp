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

#include "planner/long_sequences.hpp"
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
        shortest_(shortest),
        long_(problem) {}

  // The largest time, from `low` on, that is proved to be too short; `low` if none is. `held`: most
  // tokens of a micro-batch on a rank in plans that end within a time.
  double improve(double low, const std::function<double(double)>& held) {
    long_.held = held(low * kMostGain);
    size_t before = 0;
    const double top = low * kMostGain;
    for (const double part : {0.75, 0.35, 0.12}) {
      const double least = part * long_.loads.front().tokens;
      const size_t count =
          std::partition_point(long_.loads.begin(), long_.loads.end(),
                               [&](const Load& load) { return load.tokens >= least; }) -
          long_.loads.begin();
      if (count == before) continue;
      before = count;
      if (!long_.choose(count)) break;
      ramps_.emplace(cost_, long_.least_share, long_.most_share, shortest_);
      for (const double beside : {0.0, 1.5, 4.0, 10.0}) {
        for (const double times : {1.0, 1.25, 1.6, 2.2}) {
          if (long_.others_work <= 0 && times > 1) break;
          low = raise(low, top, beside, times);
        }
      }
    }
    return low;
  }

 private:
  static constexpr double kMostGain = 1.4;
  static constexpr double kStep = 1.002;  // of the times that are tried
  static constexpr int kCells = 1024;     // of the longest possible micro-batch
  static constexpr int kPieces = 4;
  static constexpr int kMost = 160;  // micro-batches of long sequences on a rank
  static constexpr int kLevels = 128;
  static constexpr int kBoxes = 2000;
  static constexpr double kLeaf = 1 / 1024.;  // of the time
  static constexpr std::array<double, 9> kPrices = {0, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5};

  struct Box {
    double low = 0, high = 0;   // idle seconds of a rank
    double less = 0, more = 0;  // of these and what other sequences run in them
  };

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
    most_ = static_cast<int>(std::min(time / long_.least + 1e-9, 1e6));
    if (most_ > kMost) return false;
    double all = long_.others_work;
    for (LongSequences::Class& each : long_.classes) {
      each.gain = times * LongSequences::price(each, time / (stages_ + beside));
      all += each.gain * each.count;
    }
    needed_ = all / ranks_ * (1 - 1e-9);
    time_ = time;
    other_s_ = 0;
    if (long_.others_work > 0) other_s_ = cost_.params().fixed + long_.densest * long_.held;
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
    const auto note = [&](const LongSequences::Passes& passes, double seconds, double gain) {
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
    for (const LongSequences::Class& each : long_.classes) {
      most = std::max(most, each.gain);
      for (const LongSequences::Size& size : each.sizes)
        note(size.passes, size.passes.seconds(), each.gain / size.ranks);
    }
    for (const LongSequences::Together& group : long_.together) {
      // What they gain is limited by their number, and by their compute.
      const double slope = long_.slopeOn(group.ranks);
      const bool more = group.number > LongSequences::kMaxTogether;
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

  // Whether a rank may get its share of all weights with idle seconds from this box. Tests what can
  // only be wrong by taking the better end for each term, and halves what passes.
  bool mayFit(const Box& box) {
    if (++boxes_ > kBoxes) return true;
    if (most(box) < needed_) return false;
    const double width = box.high - box.low;
    const double height = long_.others_work > 0 ? box.more - box.less : 0;
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
    if (long_.others_work > 0) {
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
    const double price = long_.others_work > 0 ? 1 : 0;  // of the other sequences
    double best = price * std::min(time_ - box.low, busy);
    const auto highest_forward = static_cast<int>(cellAt(longestPass(long_.most_share, box.high)));
    const auto highest_backward =
        static_cast<int>(cellAt(longestPass(1 - long_.least_share, box.high)));
    std::array<double, kPrices.size()> highest;
    for (size_t k = 0; k < kPrices.size(); ++k) {
      highest[k] = std::min(forward_[k][highest_forward], backward_[k][highest_backward]);
    }
    for (int count = 1; count <= most_ && best < needed_; ++count) {
      const double room = std::min(time_ - box.low, busy + count * fixed);
      if (room < hidden + count * long_.least * (1 - 1e-9)) break;
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
    const double highest_forward = cellAt(longestPass(long_.most_share, idle));
    const double highest_backward = cellAt(longestPass(1 - long_.least_share, idle));
    std::array<double, kLevels> gains{};
    for (int i = 0; i < count; ++i) {
      const double up = cellAt(ramps_->rising(i) * long_.least_share * reach / kLevels);
      const double down =
          cellAt(ramps_->falling(count - 1 - i) * (1 - long_.most_share) * reach / kLevels);
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
  LongSequences long_;
  std::optional<PipelineRamps> ramps_;
  // For the time and the weights that are being tried:
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
