// How a block of neighbouring ranks runs sequences of one length in the least time: side by side on
// parts of the block, after each other, or each on all of it, and so on within the parts. 27
// sequences on 5 ranks may be five waves of one rank each and two of all 5; 8 ranks may run groups
// of 3, 3 and 2 ranks, and then groups of 4. Any such nesting of cuts is found.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
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
  BlockTimes(int max_ranks, int min_size, int grain, double limit, const BlockTimes* inside,
             const std::function<double(int, int)>& seconds);

  // Numbers of sequences that so many ranks run within the limit: 0 to this, without it.
  int counts(int ranks) const { return static_cast<int>(rows_[ranks / grain_].size()); }

  double time(int ranks, int count) const { return rows_[ranks / grain_][count].time; }

  // The seconds of all ranks together that they work.
  double work(int ranks, int count) const { return rows_[ranks / grain_][count].work; }

  // The most sequences that end in time.
  int most(int ranks, double limit) const;

  // The groups in an order in which each can run as soon as its ranks are free.
  void appendGroups(int ranks, int count, int first, std::vector<Group>& groups) const;

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
  Cell sideBySide(int row, int count) const;

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
                double limit, bool packed);

  // Those that end by a target time, for all numbers of ranks that lie well in nodes.
  std::vector<BlockPattern> find(double target) const;

 private:
  static constexpr double kMostSteps = 3e5;
  static constexpr int kMostRanks = 96;

  void addPatterns(const BlockTimes& times, int ranks, double target,
                   std::vector<BlockPattern>& found) const;

  // The share of groups of this size that lie on two nodes where they fill nodes side by side.
  double crossingShare(int size) const;

  const BlockTimes& timesOf(int ranks) const;

  double seconds(int size, int count, Scope scope) const;

  // So that the search takes no longer than that of kMostSteps.
  int mostRanks(double limit) const;

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
