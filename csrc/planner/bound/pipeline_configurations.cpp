#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "planner/bound/bound.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {
namespace {

// The sequences of a step that a lower bound takes one by one, in classes of about equal length,
// and what the passes of their micro-batches take (docs/bound.md, claim 15).
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
    loads.reserve(problem.count());
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

class PipelineConfigurations {
 public:
  // `shortest`: least seconds of compute of any micro-batch.
  PipelineConfigurations(const Problem& problem, const StagesInPasses& stages, double shortest)
      : cost_(problem.cost()),
        stages_(stages),
        ranks_(problem.ranks()),
        shortest_(shortest),
        long_(problem) {}

  // The largest time, from `low` on, that is proved to be too short; `low` if none is. `held`: most
  // tokens of a micro-batch on a rank in plans that end within a time.
  double improve(double low, const std::function<double(double)>& held) {
    long_.held = held(low * kMostGain);
    size_t before = 0;
    const double top = low * kMostGain;
    for (const double part : {0.75, 0.5, 0.35, 0.12}) {
      const double least = part * long_.loads.front().tokens;
      const size_t count =
          std::partition_point(long_.loads.begin(), long_.loads.end(),
                               [&](const Load& load) { return load.tokens >= least; }) -
          long_.loads.begin();
      if (count == before) continue;
      before = count;
      if (!long_.choose(count)) break;
      ramps_.emplace(cost_, stages_, long_.least_share, long_.most_share, shortest_);
      for (const double beside : {-2.0, 0.0, 1.5, 4.0, 10.0}) {
        for (const double times : {1.0, 1.25, 1.6, 2.2, 3.0}) {
          if (long_.others_work <= 0 && times > 1) break;
          for (const double rise : {0.0, 1.0, 2.0}) low = raise(low, top, {beside, times, rise});
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

  // Where in the tables the passes are that such a box allows.
  struct Reach {
    double idle = 0;                   // seconds, for the ways down and back
    double forward = 0, backward = 0;  // of the longest passes
  };

  // For the long sequences: as if their micro-batches took a share of the time, `beside` others
  // after each other, so many times; more for longer ones, with this power of their length, since
  // no others fill the highest places.
  struct Weights {
    double beside, times, rise;
  };

  // Raises `low` as far as these weights prove.
  double raise(double low, double top, const Weights& weights) {
    if (!tooShort(low * kStep, weights)) return low;
    double step = kStep;
    double high = low * step;
    do {
      low = high;
      step *= step;
      high = low * step;
    } while (high < top && tooShort(high, weights));
    high = std::min(high, top);
    while (high > low * kStep) {
      const double middle = 0.5 * (low + high);
      (tooShort(middle, weights) ? low : high) = middle;
    }
    return low;
  }

  // Whether the weights of all sequences are more than all ranks can get within the time.
  bool tooShort(double time, const Weights& weights) {
    const double longest = time / stages_.all;
    most_ = static_cast<int>(std::min(time / long_.least + 1e-9, 1e6));
    if (most_ > kMost) return false;
    double all = long_.others_work;
    const double shortest_long = long_.classes.back().load.tokens;
    for (LongSequences::Class& each : long_.classes) {
      const double rise = std::pow(each.load.tokens / shortest_long, weights.rise);
      const double wanted = time / std::max(1.0, stages_.all + weights.beside);
      each.gain = weights.times * rise * LongSequences::price(each, wanted);
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
      if (firstCount(box, 0) >= 0) return false;
    }
    boxes_ = 0;
    const double others = stages_.micro_batches * other_s_;
    return !mayFit({0, time, 0, time + others}, 0);
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
  // only be wrong by taking the better end for each term, and halves what passes. Fewer than
  // `least` micro-batches with long sequences are known not to suffice.
  bool mayFit(const Box& box, int least) {
    if (++boxes_ > kBoxes) return true;
    least = firstCount(box, least);
    if (least < 0) return false;
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
    return mayFit(second, least) || mayFit(first, least);
  }

  // The fewest micro-batches with long sequences, from `least` on, with which a rank may get its
  // share in this box; -1 if there are none. Each term is better in a box than in a part of it, so
  // what a number cannot get in a box it cannot get in a part of it.
  int firstCount(const Box& box, int least) {
    const double others = stages_.micro_batches;
    const double share = cost_.params().forward;
    const double large = std::max(share, 1 - share);
    double hidden = 0;  // of other sequences
    double idle = box.high;
    if (long_.others_work > 0) {
      // What they hide at most, and how long they are for what they have to hide.
      const double full = others * other_s_;
      if (box.more < box.low || box.less > box.high + full) return -1;
      const double wanted = std::max(0.0, box.less - box.high);
      hidden =
          wanted <= large * full ? wanted / large : full + (wanted - large * full) / (1 - large);
      // The work in it, without what each of these micro-batches costs.
      hidden = std::max(0.0, hidden - 2 * others * cost_.params().fixed);
      idle = box.more;
    }
    const double busy = ramps_->mostWork(time_);
    const double fixed = cost_.params().fixed;
    const double price = long_.others_work > 0 ? 1 : 0;  // of the other sequences
    if (least == 0 && price * std::min(time_ - box.low, busy) >= needed_) return 0;
    down_.clear();
    back_.clear();
    const Reach reach{idle, cellAt(longestPass(long_.most_share, box.high)),
                      cellAt(longestPass(1 - long_.least_share, box.high))};
    std::array<double, kPrices.size()> highest;
    for (size_t k = 0; k < kPrices.size(); ++k) {
      highest[k] = std::min(forward_[k][static_cast<int>(reach.forward)],
                            backward_[k][static_cast<int>(reach.backward)]);
    }
    for (int count = std::max(1, least); count <= most_; ++count) {
      const double room = std::min(time_ - box.low, busy + count * fixed);
      if (room < hidden + count * long_.least * (1 - 1e-9)) break;
      const auto flat = [&](size_t k) { return kPrices[k] * (room - hidden) + price * hidden; };
      bool enough = true;
      for (size_t k = kPrices.size(); enough && k-- > 0 && kPrices[k] >= price;) {
        enough = flat(k) + count * highest[k] >= needed_;
      }
      // The price that showed it last time first.
      for (size_t i = 0; i < kPrices.size() && enough; ++i) {
        const size_t k = i == 0 ? first_price_ : i - (i <= first_price_ ? 1 : 0);
        if (kPrices[k] < price) continue;
        enough = mayGet(needed_ - flat(k), count, k, reach);
        if (!enough) first_price_ = k;
      }
      if (enough) return count;
    }
    return -1;
  }

  double longestPass(double share, double idle) const { return idle * ramps_->highest() * share; }

  // Where in a table the passes are that end within these seconds, as a fraction.
  double cellAt(double seconds) const {
    return std::min(static_cast<double>(kCells), seconds / cell_ * (1 + 1e-9));
  }

  // Whether `count` micro-batches of a rank may get so much beyond the price of their times. The
  // idle seconds are for the way of the first ones down the stages, a part that never falls from
  // one micro-batch to the next, and for the way of the last ones back. Most often they may, with
  // the parts with which they could in the last box.
  bool mayGet(double wanted, int count, size_t price, const Reach& reach) {
    std::vector<int>& parts = parts_[price][count];
    if (!parts.empty() && gainWith(parts, price, reach) >= wanted) return true;
    findCells(count, reach);
    findGains(count, price);
    const auto& all = gains_[count - 1];
    if (*std::max_element(all.begin(), all.end()) < wanted) return false;
    parts.resize(count);
    for (int i = count - 1, levels = kLevels; i >= 0; --i) {  // what each of them follows
      const auto begin = gains_[i].begin();
      parts[i] = static_cast<int>(std::max_element(begin, begin + levels) - begin);
      levels = parts[i] + 1;
    }
    return true;
  }

  double gainWith(const std::vector<int>& parts, size_t price, const Reach& reach) const {
    const auto count = static_cast<int>(parts.size());
    double gain = 0;
    for (int i = 0; i < count; ++i) {
      const int f =
          cellDown(cellOfWay(ramps_->rising(i) * long_.least_share, reach), parts[i], reach);
      const int b =
          cellBack(cellOfWay(ramps_->falling(count - 1 - i) * (1 - long_.most_share), reach),
                   parts[i], reach);
      gain += std::min(forward_[price][f], backward_[price][b]);
    }
    return gain;
  }

  // The cell of a pass for each level, and those of the longest passes at one of them.
  double cellOfWay(double seconds, const Reach& reach) const {
    return cellAt(seconds * reach.idle / kLevels);
  }
  static int cellDown(double each, int level, const Reach& reach) {
    return static_cast<int>(std::min(each * (level + 1), reach.forward));
  }
  static int cellBack(double each, int level, const Reach& reach) {
    return static_cast<int>(std::min(each * (kLevels - level), reach.backward));
  }

  // All cells of micro-batches counted from the first one on the way down and from the last one on
  // the way back.
  void findCells(int count, const Reach& reach) {
    for (auto i = static_cast<int>(down_.size()); i < count; ++i) {
      const double down = cellOfWay(ramps_->rising(i) * long_.least_share, reach);
      const double back = cellOfWay(ramps_->falling(i) * (1 - long_.most_share), reach);
      down_.emplace_back();
      back_.emplace_back();
      for (int level = 0; level < kLevels; ++level) {
        down_[i][level] = cellDown(down, level, reach);
        back_[i][level] = cellBack(back, level, reach);
      }
    }
  }

  // The most that the micro-batches get up to each one, by its part.
  void findGains(int count, size_t price) {
    const double* const forward = forward_[price].data();
    const double* const backward = backward_[price].data();
    const std::array<double, kLevels> none{};
    gains_.resize(std::max<size_t>(gains_.size(), count));
    for (int i = 0; i < count; ++i) {
      const auto& before = i == 0 ? none : gains_[i - 1];
      const Cells& f = down_[i];
      const Cells& b = back_[count - 1 - i];
      const auto own = [&](int level) { return std::min(forward[f[level]], backward[b[level]]); };
      double most = -kForever;
      for (int level = 0; level < kLevels; level += 2) {  // pairs: half as long a chain of maxima
        const double both = std::max(before[level], before[level + 1]);
        gains_[i][level] = std::max(most, before[level]) + own(level);
        most = std::max(most, both);
        gains_[i][level + 1] = most + own(level + 1);
      }
    }
  }

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const CostModel& cost_;
  const StagesInPasses stages_;
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
  // Levels of the parts with which so many micro-batches could get enough, by price and number.
  std::array<std::array<std::vector<int>, kMost + 1>, kPrices.size()> parts_;
  // For a box:
  using Cells = std::array<int, kLevels>;
  std::vector<Cells> down_, back_;
  std::vector<std::array<double, kLevels>> gains_;
  std::array<std::vector<double>, kPrices.size()> forward_, backward_;  // by price, by cell
};

}  // namespace

double raiseByPipelineConfigurations(const Problem& problem, const StagesInPasses& stages,
                                     double shortest, double low,
                                     const std::function<double(double)>& held) {
  return PipelineConfigurations(problem, stages, shortest).improve(low, held);
}

}  // namespace hdpcomm::planner
