// How a block of neighbouring ranks runs sequences of one length in the least time: side by side on
// parts of the block, after each other, or each on all of it, and so on within the parts. 27
// sequences on 5 ranks may be five waves of one rank each and two of all 5; 8 ranks may run groups
// of 3, 3 and 2 ranks, and then groups of 4. Any such nesting of cuts is found.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

// The least time for each number of ranks and of sequences, up to a limit.
class BlockTimes {
 public:
  // Neighbouring ranks that run so many sequences as one micro-batch.
  struct Group {
    int first = 0;
    int size = 1;
    int count = 1;
  };

  // Micro-batches take `seconds(size, count)`, infinity where memory has no room; cuts side by side
  // are at multiples of `grain`, whose own times are given by `inside`, if any.
  template <class Seconds>
  BlockTimes(int max_ranks, int min_size, int grain, double limit, const BlockTimes* inside,
             const Seconds& seconds)
      : grain_(grain), inside_(inside), rows_(max_ranks / grain + 1) {
    int packed = 1;  // sequences of a micro-batch on one rank, at most
    while (packed < kMostPacked && std::isfinite(seconds(min_size, packed + 1))) ++packed;
    rows_[0].push_back({});
    double left = kMostTrials;
    for (int row = 1; row < static_cast<int>(rows_.size()); ++row) {
      const int ranks = row * grain;
      const auto most_first = static_cast<int>(
          std::min(2.0 * std::max(1, ranks / min_size) * packed, 1.0 * kMostFirst));
      std::vector<Cell>& cells = rows_[row];
      cells.push_back({});
      // Larger numbers of sequences are left out where the trials for this number of ranks are
      // over.
      double own = left / (static_cast<double>(rows_.size()) - row);
      left -= own;
      for (int count = 1; own > 0; ++count) {
        own -= std::min(most_first, count - 1) + kTrialsOfCut * row;
        Cell best = sideBySide(row, count);
        if (row == 1 && inside_ != nullptr && count < inside_->counts(grain_)) {
          best = {inside_->time(grain_, count), inside_->work(grain_, count), Kind::kInside, 0, 0};
        }
        const double together = ranks >= min_size ? seconds(ranks, count) : kNever;
        if (together < best.time) best = {together, together * ranks, Kind::kGroup, 0, 0};
        for (int first = 1; first <= std::min(most_first, count - 1); ++first) {
          const double time = cells[first].time + cells[count - first].time;
          if (time >= best.time) continue;
          best = {time, cells[first].work + cells[count - first].work, Kind::kAfter, 0, first};
        }
        if (best.time > limit) break;
        cells.push_back(best);
      }
      left += std::max(0.0, own);
    }
  }

  // Numbers of sequences that so many ranks run within the limit: 0 to this, without it.
  int counts(int ranks) const { return static_cast<int>(rows_[ranks / grain_].size()); }

  double time(int ranks, int count) const { return rows_[ranks / grain_][count].time; }

  // The seconds of all ranks together that they work.
  double work(int ranks, int count) const { return rows_[ranks / grain_][count].work; }

  // The most sequences that end in time.
  int most(int ranks, double limit) const {
    const std::vector<Cell>& cells = rows_[ranks / grain_];
    const auto end = std::partition_point(cells.begin(), cells.end(), [&](const Cell& cell) {
      return cell.time <= limit * (1 + 1e-9);
    });
    return static_cast<int>(end - cells.begin()) - 1;
  }

  // The groups in an order in which each can run as soon as its ranks are free.
  void appendGroups(int ranks, int count, int first, std::vector<Group>& groups) const {
    if (count == 0) return;
    const Cell& cell = rows_[ranks / grain_][count];
    switch (cell.kind) {
      case Kind::kGroup:
        groups.push_back({first, ranks, count});
        break;
      case Kind::kInside:
        inside_->appendGroups(ranks, count, first, groups);
        break;
      case Kind::kSide:
        appendGroups(cell.ranks, cell.count, first, groups);
        appendGroups(ranks - cell.ranks, count - cell.count, first + cell.ranks, groups);
        break;
      case Kind::kAfter:
        appendGroups(ranks, cell.count, first, groups);
        appendGroups(ranks, count - cell.count, first, groups);
        break;
    }
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kMostTrials = 4e6;  // cuts that are looked at
  static constexpr double kTrialsOfCut = 8;   // one side by side, in trials of the others
  static constexpr int kMostPacked = 1 << 16;
  static constexpr int kMostFirst = 1 << 30;

  enum class Kind : uint8_t { kGroup, kInside, kSide, kAfter };

  // The first part of the cut: its ranks (side by side) and its sequences.
  struct Cell {
    double time = 0;
    double work = 0;  // seconds of ranks
    Kind kind = Kind::kGroup;
    int ranks = 0;
    int count = 0;
  };

  // The best cut into two parts side by side. Times rise with the number of sequences, so the best
  // number for one part is where both end together.
  Cell sideBySide(int row, int count) const {
    Cell best{kNever, 0, Kind::kSide, 0, 0};
    for (int one = (row + 1) / 2; one < row; ++one) {
      const std::vector<Cell>& left = rows_[one];
      const std::vector<Cell>& right = rows_[row - one];
      const auto left_time = [&](int own) {
        return own < static_cast<int>(left.size()) ? left[own].time : kNever;
      };
      const auto right_time = [&](int own) {
        return own < static_cast<int>(right.size()) ? right[own].time : kNever;
      };
      int low = 0;  // the fewest sequences with which the left part is not the first to end
      int high = count;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (left_time(middle) >= right_time(count - middle)) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      for (const int own : {low, low - 1}) {
        if (own < 0) continue;
        const double time = std::max(left_time(own), right_time(count - own));
        if (time >= best.time) continue;
        const double work = left[own].work + right[count - own].work;
        best = {time, work, Kind::kSide, one * grain_, own};
      }
    }
    return best;
  }

  const int grain_;
  const BlockTimes* const inside_;
  std::vector<std::vector<Cell>> rows_;  // by ranks over the grain, then by sequences
};

// What a block of ranks runs within a target time: `count` sequences of one length.
struct BlockPattern {
  int ranks = 1;
  int count = 0;
  double used = 0;  // seconds, mean over the ranks
  const BlockTimes* times = nullptr;
};

// All patterns that are worth a try for sequences of one length.
class BlockPatterns {
 public:
  // `node`: ranks of a node, or of the cluster where links are all alike. `packed`: micro-batches
  // may have as many sequences as memory without offload holds.
  BlockPatterns(const CostModel& cost, const Load& load, int min_size, int node, int max_ranks,
                double limit, bool packed)
      : cost_(cost), load_(load), min_size_(min_size), node_(node), packed_(packed) {
    const auto most = std::min(max_ranks, mostRanks(limit));
    const bool alike = node == cost.cluster().ranks;
    most_ = most;
    const Scope widest = cost.cluster().scope(0, cost.cluster().ranks - 1);
    const auto anywhere = [&](int size) { return alike || size == 1 ? Scope::kNode : widest; };
    anywhere_ = std::make_unique<BlockTimes>(
        most, min_size, 1, limit, nullptr,
        [&](int size, int count) { return seconds(size, count, anywhere(size)); });
    if (alike) return;
    const auto inside = [&](int size, int count) { return seconds(size, count, Scope::kNode); };
    inside_ =
        std::make_unique<BlockTimes>(std::min(node, most), min_size, 1, limit, nullptr, inside);
    if (most < node) return;
    nodes_ = std::make_unique<BlockTimes>(
        most / node * node, min_size, node, limit, inside_.get(), [&](int size, int count) {
          return seconds(size, count, size <= node ? Scope::kNode : widest);
        });
    side_by_side_ = std::make_unique<BlockTimes>(
        most / node * node, min_size, 1, limit, nullptr, [&](int size, int count) {
          const double crossing = crossingShare(size);
          return (1 - crossing) * seconds(size, count, crossing < 1 ? Scope::kNode : widest) +
                 crossing * seconds(size, count, widest);
        });
  }

  // Those that end by a target time, for all numbers of ranks that lie well in nodes.
  std::vector<BlockPattern> find(double target) const {
    std::vector<BlockPattern> found;
    for (int ranks = min_size_; ranks <= most_; ++ranks) {
      if (ranks < node_ && node_ % ranks != 0 && inside_ != nullptr) continue;
      addPatterns(timesOf(ranks), ranks, target, found);
      const bool whole_nodes = ranks > node_ && ranks % node_ == 0;
      if (whole_nodes && side_by_side_) addPatterns(*side_by_side_, ranks, target, found);
    }
    return found;
  }

 private:
  static constexpr double kMostSteps = 3e5;
  static constexpr int kMostRanks = 96;

  void addPatterns(const BlockTimes& times, int ranks, double target,
                   std::vector<BlockPattern>& found) const {
    const int most = times.most(ranks, target);
    const int least = std::max(1, most - std::max(1, ranks / min_size_));
    for (int count = most; count >= least; --count) {
      found.push_back({ranks, count, times.work(ranks, count) / ranks, &times});
    }
  }

  // The share of groups of this size that lie on two nodes where they fill nodes side by side.
  double crossingShare(int size) const {
    return size > node_ ? 1 : static_cast<double>(size - std::gcd(size, node_)) / node_;
  }

  const BlockTimes& timesOf(int ranks) const {
    if (inside_ == nullptr) return *anywhere_;
    if (ranks <= node_) return *inside_;
    return ranks % node_ == 0 ? *nodes_ : *anywhere_;
  }

  double seconds(int size, int count, Scope scope) const {
    const double pieces = std::ceil(load_.tokens / size) * count;
    if (count > 1 && (!packed_ || pieces > static_cast<double>(cost_.memory().capacity))) {
      return std::numeric_limits<double>::infinity();
    }
    return cost_.seconds({load_.squares * count, load_.tokens * count}, size, scope);
  }

  // So that the search takes no longer than that of kMostSteps.
  int mostRanks(double limit) const {
    const double of_a_rank = limit / (min_size_ * cost_.seconds(load_, min_size_));
    const double most = std::cbrt(kMostSteps / std::max(of_a_rank, 1e-6));
    return static_cast<int>(std::clamp(most, static_cast<double>(min_size_), 1.0 * kMostRanks));
  }

  const CostModel& cost_;
  const Load load_;
  const int min_size_;
  const int node_;
  const bool packed_;
  int most_ = 0;
  std::unique_ptr<BlockTimes> anywhere_;  // groups lie anywhere
  std::unique_ptr<BlockTimes> inside_;    // within a node; null where links are all alike
  std::unique_ptr<BlockTimes> nodes_;     // whole nodes
  // Whole nodes whose groups lie side by side, some across a border: times are about their mean.
  std::unique_ptr<BlockTimes> side_by_side_;
};

}  // namespace hdpcomm::planner
