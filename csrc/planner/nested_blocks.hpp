// Plans for long sequences of about the same length, of which a whole number of waves leaves ranks
// idle. A block of neighbouring ranks runs waves of groups, the larger ones first: 27 sequences on
// 5 ranks are two waves of one group of 5 ranks, then five waves of 5 groups of one rank. With the
// target time, the numbers of ranks and waves vary from block to block.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "planner/block_packer.hpp"

namespace hdpcomm::planner {

// Waves of groups of one size, over all ranks of a part of a block.
struct GroupWaves {
  int size = 1;
  int waves = 1;
};

// Neighbouring ranks that run waves of groups, the smallest size first; each divides the next one.
struct BlockPart {
  int ranks = 1;
  std::vector<GroupWaves> stages;
};

// What a block of ranks runs within the target time: `count` sequences of one length.
struct BlockPattern {
  int ranks = 1;
  int count = 0;
  double used = 0;  // seconds, mean over the ranks
  std::vector<BlockPart> parts;
};

// All patterns that are worth a try for sequences of one length.
class BlockPatterns {
 public:
  // `node`: ranks of a node, or of the cluster where links are all alike.
  BlockPatterns(const CostModel& cost, int node, int max_ranks)
      : cost_(cost), node_(node), max_ranks_(max_ranks) {}

  std::vector<BlockPattern> find(const Load& load, int min_size, double target) {
    load_ = load;
    min_size_ = min_size;
    target_ = target;
    found_.clear();
    inside_.assign(std::max(node_, 1) + 1, {});
    const int most = std::min(max_ranks_, std::max(kMostRanks, 3 * min_size));
    for (int ranks = min_size; ranks <= most; ++ranks) {
      divisors_.clear();
      for (int size = min_size; size <= ranks; ++size) {
        if (ranks % size == 0 && liesInNodes(size, ranks)) divisors_.push_back(size);
      }
      part_ = {ranks, {}};
      extend(0, target, 0);
    }
    if (node_ < cost_.cluster().ranks) joinInside();
    return std::move(found_);
  }

 private:
  static constexpr int kMostRanks = 24;
  static constexpr size_t kMostStages = 3;

  bool liesInNodes(int size, int ranks) const {
    return size == 1 || size > node_ || ranks <= node_ || (node_ % size == 0 && ranks % node_ == 0);
  }

  // Adds waves of the divisors from `next` on to the part, in all ways that leave less than two
  // waves of each size.
  void extend(size_t next, double left, int count) {
    for (size_t i = next; i < divisors_.size(); ++i) {
      const int size = divisors_[i];
      const int most = static_cast<int>(left * (1 + 1e-9) / cost_.seconds(load_, size));
      const bool last = size == part_.ranks;
      if (!last && part_.stages.size() + 1 == kMostStages) continue;
      for (int waves = most; waves > 0 && waves >= most - (last ? 0 : 1); --waves) {
        part_.stages.push_back({size, waves});
        const double rest = left - waves * cost_.seconds(load_, size);
        const int sum = count + part_.ranks / size * waves;
        last ? keep(sum, target_ - rest) : extend(i + 1, rest, sum);
        part_.stages.pop_back();
      }
    }
  }

  void keep(int count, double used) {
    const BlockPattern pattern{part_.ranks, count, used, {part_}};
    if (part_.ranks < node_) {
      BlockPattern& best = inside_[part_.ranks];
      if (count > best.count || (count == best.count && used < best.used)) best = pattern;
      if (node_ % part_.ranks != 0 && node_ < cost_.cluster().ranks) return;  // lies badly in nodes
    }
    found_.push_back(pattern);
  }

  // The best combination of smaller parts that fill a node.
  void joinInside() {
    std::vector<BlockPattern> best(node_ + 1);
    for (int ranks = 1; ranks <= node_; ++ranks) {
      best[ranks] = best[ranks - 1];
      for (int own = 1; own <= std::min(ranks, node_ - 1); ++own) {
        const BlockPattern& part = inside_[own];
        const BlockPattern& rest = best[ranks - own];
        if (part.count == 0 || part.count + rest.count <= best[ranks].count) continue;
        BlockPattern joined = rest;
        joined.count += part.count;
        joined.used += part.used * own / node_;
        joined.parts.push_back(part.parts.front());
        best[ranks] = std::move(joined);
      }
    }
    BlockPattern& whole = best[node_];
    whole.ranks = node_;
    if (whole.count > 0 && node_ <= max_ranks_) found_.push_back(std::move(whole));
  }

  const CostModel& cost_;
  const int node_;
  const int max_ranks_;
  Load load_;
  int min_size_ = 1;
  double target_ = 0;
  std::vector<int> divisors_;
  BlockPart part_;
  std::vector<BlockPattern> inside_;  // the best one of each number of ranks below a node
  std::vector<BlockPattern> found_;
};

// Places sequences, or packs of short ones, by falling length.
class NestedBlocks {
 public:
  struct Unit {
    Load load;
    int min_size = 1;
  };

  // `others_s`: seconds of a rank for the sequences that are not placed here.
  NestedBlocks(const CostModel& cost, std::vector<Unit> units, double others_s)
      : cost_(cost), units_(std::move(units)), others_s_(others_s) {
    const Cluster& cluster = cost.cluster();
    const CostParams& params = cost.params();
    const bool alike =
        params.kv_intra == params.kv_inter && params.latency_intra == params.latency_inter;
    node_ = alike ? cluster.ranks : std::min(cluster.ranks_per_node, cluster.ranks);
    const auto count = static_cast<int>(units_.size());
    while (count / copies_ > kMaxRows && cluster.ranks / (2 * copies_) >= 1) copies_ *= 2;
    rows_ = (count + copies_ - 1) / copies_;
  }

  // Whether all units can end about at the target, with time left for the others; if so, place()
  // tells where they run.
  bool fit(double target) {
    const int ranks = cost_.cluster().ranks / copies_;
    findPatterns(target, ranks);
    for (const double idle : {1.0, 0.3, 0.0}) {
      if (cover(target, idle, ranks)) return true;
    }
    return false;
  }

  // The placements of all units. `ready`: when each rank is free.
  std::vector<Placement> place(std::vector<double>& ready) const {
    std::vector<int> order(blocks_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto rank_order = [&](int block) {
      const int ranks = blocks_[block].pattern->ranks;
      return ranks % node_ == 0 ? std::make_pair(0, 0)
                                : std::make_pair(ranks < node_ ? 1 : 2, -ranks);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return rank_order(a) < rank_order(b); });
    ready.assign(cost_.cluster().ranks, 0.0);
    std::vector<Placement> placements;
    int first = 0;
    for (const int block : order) {
      for (int copy = 0; copy < copies_; ++copy) {
        placeBlock(blocks_[block], copy, first, ready, placements);
        first += blocks_[block].pattern->ranks;
      }
    }
    return placements;
  }

 private:
  static constexpr int kMaxRows = 4096;
  static constexpr int kMaxClasses = 24;

  struct PlacedBlock {
    const BlockPattern* pattern;
    int row;
  };

  // Rows of about the same length have the same patterns, those of the longest one.
  void findPatterns(double target, int ranks) {
    BlockPatterns finder(cost_, node_, ranks);
    patterns_.clear();
    class_of_.assign(rows_, 0);
    for (int row = 0; row < rows_; ++row) {
      const Unit& unit = units_[row * copies_];
      const auto classes = static_cast<int>(patterns_.size());
      const bool same =
          row > 0 && unit.load.squares == class_squares_ && unit.min_size == class_min_size_;
      const bool near =
          row > 0 && row * kMaxClasses < classes * rows_ && unit.min_size == class_min_size_;
      if (!same && !near) {
        patterns_.push_back(finder.find(unit.load, unit.min_size, target));
        class_squares_ = unit.load.squares;
        class_min_size_ = unit.min_size;
      }
      class_of_[row] = static_cast<int>(patterns_.size()) - 1;
    }
  }

  // Covers all rows by blocks of the least ranks plus work; `idle`: how much of the time that a
  // block leaves counts as lost.
  bool cover(double target, double idle, int ranks) {
    std::vector<double> cost(rows_ + 1, 0.0);
    std::vector<const BlockPattern*> choice(rows_, nullptr);
    for (int row = rows_ - 1; row >= 0; --row) {
      cost[row] = std::numeric_limits<double>::infinity();
      for (const BlockPattern& pattern : patterns_[class_of_[row]]) {
        const double own = pattern.ranks * (pattern.used + idle * (target - pattern.used));
        const double sum = own + cost[std::min(rows_, row + pattern.count)];
        if (sum < cost[row]) {
          cost[row] = sum;
          choice[row] = &pattern;
        }
      }
      if (choice[row] == nullptr) return false;
    }
    blocks_.clear();
    int taken = 0;
    double used = 0;
    for (int row = 0; row < rows_;) {
      blocks_.push_back({choice[row], row});
      taken += choice[row]->ranks;
      used += choice[row]->ranks * choice[row]->used;
      row += choice[row]->count;
    }
    return taken <= ranks && used * copies_ + others_s_ <= target * cost_.cluster().ranks;
  }

  // The larger groups first: they get the longest units.
  void placeBlock(const PlacedBlock& block, int copy, int first, std::vector<double>& ready,
                  std::vector<Placement>& placements) const {
    int row = block.row;
    for (const BlockPart& part : block.pattern->parts) {
      for (auto stage = part.stages.rbegin(); stage != part.stages.rend(); ++stage) {
        for (int wave = 0; wave < stage->waves; ++wave) {
          for (int begin = first; begin < first + part.ranks; begin += stage->size, ++row) {
            const size_t unit = static_cast<size_t>(row) * copies_ + copy;
            if (row >= rows_ || unit >= units_.size()) continue;
            const auto from = ready.begin() + begin;
            const double start = *std::max_element(from, from + stage->size);
            const int node = cost_.cluster().ranks_per_node;
            const bool one_node = begin / node == (begin + stage->size - 1) / node;
            std::fill_n(from, stage->size,
                        start + cost_.seconds(units_[unit].load, stage->size, one_node));
            placements.push_back({static_cast<int32_t>(unit), start, {{begin, stage->size}}});
          }
        }
      }
      first += part.ranks;
    }
  }

  const CostModel& cost_;
  const std::vector<Unit> units_;
  const double others_s_;
  int node_ = 1;
  int copies_ = 1;  // blocks of the same pattern; each copy has one unit of a row
  int rows_ = 0;
  double class_squares_ = 0;
  int class_min_size_ = 0;
  std::vector<std::vector<BlockPattern>> patterns_;  // of each class of rows
  std::vector<int> class_of_;
  std::vector<PlacedBlock> blocks_;
};

// The best plan of nested blocks that ends before `limit`, if there is one.
std::optional<Plan> planNested(const Problem& problem, double lower_bound, double limit);

}  // namespace hdpcomm::planner
