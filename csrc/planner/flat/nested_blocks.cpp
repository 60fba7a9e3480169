#include "planner/flat/nested_blocks.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/flat/block_patterns.hpp"
#include "planner/flat/packing.hpp"
#include "planner/flat/wave_packer.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kAboutAsLong = 0.5;  // of the longest sequence; shorter ones fill what is left
constexpr double kMostUnits = 64;     // of a rank; with more of them little is left over
constexpr int kTargets = 9;

// Places sequences by falling length.
class NestedBlocks {
 public:
  struct Unit {
    Load load;
    int min_size = 1;
  };

  // What runs together: the first unit and, if packed, some of those after it.
  struct Micro {
    Placement placement;
    std::vector<int32_t> units;
  };

  // `others_s`: seconds of a rank for the sequences that are not placed here. `limit`: the longest
  // target. `packed`: micro-batches may have several units.
  NestedBlocks(const CostModel& cost, std::vector<Unit> units, double others_s, double limit,
               bool packed)
      : cost_(cost), units_(std::move(units)), others_s_(others_s) {
    const Cluster& cluster = cost.cluster();
    const CostParams& params = cost.params();
    const Scope widest = cluster.scope(0, cluster.ranks - 1);
    const bool alike =
        params.kv_intra == cost.kv(widest) && params.latency_intra == cost.latency(widest);
    node_ = alike ? cluster.ranks : std::min(cluster.ranks_per_node, cluster.ranks);
    const auto count = static_cast<int>(units_.size());
    while (count / copies_ > kMaxRows && cluster.ranks / (2 * copies_) >= 1) copies_ *= 2;
    rows_ = (count + copies_ - 1) / copies_;
    findClasses(limit, packed);
  }

  // Whether all units can end about at the target, with time left for the others; if so, place()
  // tells where they run.
  bool fit(double target) {
    const int ranks = cost_.cluster().ranks / copies_;
    patterns_.clear();
    for (const BlockPatterns& each : classes_) patterns_.push_back(each.find(target));
    for (const double idle : {1.0, 0.3, 0.0}) {
      if (cover(target, idle, ranks)) return true;
    }
    return false;
  }

  // The micro-batches of all units. `ready`: when each rank is free.
  std::vector<Micro> place(std::vector<double>& ready) const {
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
    std::vector<Micro> placed;
    int first = 0;
    for (const int block : order) {
      for (int copy = 0; copy < copies_; ++copy) {
        placeBlock(blocks_[block], copy, first, ready, placed);
        first += blocks_[block].pattern->ranks;
      }
    }
    return placed;
  }

 private:
  static constexpr int kMaxRows = 4096;
  static constexpr int kMaxClasses = 24;

  struct PlacedBlock {
    const BlockPattern* pattern;
    int row;
  };

  // Rows of about the same length have the same patterns, those of the longest one.
  void findClasses(double limit, bool packed) {
    const int ranks = cost_.cluster().ranks / copies_;
    const Unit* longest = nullptr;
    for (int row = 0; row < rows_; ++row) {
      const Unit& unit = units_[static_cast<size_t>(row) * copies_];
      const auto classes = static_cast<int>(classes_.size());
      const bool known = longest != nullptr && unit.min_size == longest->min_size;
      const bool same = known && unit.load.squares == longest->load.squares;
      const bool near = known && row * kMaxClasses < classes * rows_;
      if (!same && !near) {
        classes_.emplace_back(cost_, unit.load, unit.min_size, node_, ranks, limit, packed);
        longest = &unit;
      }
      class_of_.push_back(static_cast<int>(classes_.size()) - 1);
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

  // The larger groups get the longer units.
  void placeBlock(const PlacedBlock& block, int copy, int first, std::vector<double>& ready,
                  std::vector<Micro>& placed) const {
    std::vector<BlockTimes::Group> groups;
    block.pattern->times->appendGroups(block.pattern->ranks, block.pattern->count, first, groups);
    std::vector<int> by_size(groups.size());
    std::iota(by_size.begin(), by_size.end(), 0);
    std::stable_sort(by_size.begin(), by_size.end(),
                     [&](int a, int b) { return groups[a].size > groups[b].size; });
    std::vector<int> row_of(groups.size());
    int row = block.row;
    for (const int group : by_size) {
      row_of[group] = row;
      row += groups[group].count;
    }
    for (size_t i = 0; i < groups.size(); ++i) {
      const auto [begin, size, count] = groups[i];
      Micro micro;
      Load load;
      for (int own = row_of[i]; own < std::min(rows_, row_of[i] + count); ++own) {
        const size_t unit = static_cast<size_t>(own) * copies_ + copy;
        if (unit >= units_.size()) continue;
        micro.units.push_back(static_cast<int32_t>(unit));
        load += units_[unit].load;
      }
      if (micro.units.empty()) continue;
      const auto from = ready.begin() + begin;
      const double start = *std::max_element(from, from + size);
      std::fill_n(from, size, start + cost_.secondsFrom(load, begin, size));
      micro.placement = {micro.units.front(), start, {begin, size}, {}};
      placed.push_back(std::move(micro));
    }
  }

  const CostModel& cost_;
  const std::vector<Unit> units_;
  const double others_s_;
  int node_ = 1;
  int copies_ = 1;  // blocks of the same pattern; each copy has one unit of a row
  int rows_ = 0;
  std::vector<BlockPatterns> classes_;               // of rows of about the same length
  std::vector<int> class_of_;                        // of each row
  std::vector<std::vector<BlockPattern>> patterns_;  // of each class, for the target
  std::vector<PlacedBlock> blocks_;
};

}  // namespace

std::optional<Plan> planNested(const Problem& problem, double lower_bound, double limit) {
  const CostModel& cost = problem.cost();
  std::vector<Job> jobs = makeJobs(problem);
  const double about_as_long = kAboutAsLong * jobs.front().load.tokens;
  size_t long_ones = 0;
  while (long_ones < jobs.size() && jobs[long_ones].load.tokens >= about_as_long) ++long_ones;
  const bool packed = long_ones == jobs.size();  // micro-batches may have several of them
  const bool short_ones =
      2 * jobs.front().load.tokens <= static_cast<double>(cost.memory().capacity);
  if (short_ones && !packed) return {};

  std::vector<NestedBlocks::Unit> units;
  double others_s = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (i < long_ones) {
      units.push_back({jobs[i].load, jobs[i].min_size});
    } else {
      if (jobs[i].min_size > 1) return {};
      others_s += cost.leastWork(jobs[i].load);
    }
  }
  if (static_cast<double>(units.size()) > kMostUnits * problem.ranks()) return {};

  NestedBlocks blocks(cost, std::move(units), others_s, limit, packed);
  WavePacker packer(problem, jobs);
  // The best of all that were placed; plans are made of that alone.
  std::vector<NestedBlocks::Micro> best;
  Packing best_packing;
  bool found = false;
  double low = lower_bound;
  double high = limit;
  double target = lower_bound * (1 + 1e-6);
  for (int tried = 0; tried < kTargets && low < high; ++tried) {
    if (blocks.fit(target)) {
      high = target;
      std::vector<double> ready;
      std::vector<NestedBlocks::Micro> placed = blocks.place(ready);
      double makespan = *std::max_element(ready.begin(), ready.end());
      if (!packed) {
        std::vector<Placement> placements;
        for (const NestedBlocks::Micro& micro : placed) placements.push_back(micro.placement);
        makespan = packer.runPlaced(std::move(placements), ready, long_ones);
      }
      if (makespan < limit) {
        limit = makespan;
        found = true;
        best = std::move(placed);
        if (!packed) best_packing = packer.take();
      }
    } else {
      low = target;
    }
    target = 0.5 * (low + high);
  }
  if (!found) return {};
  if (!packed) return finishPlan(problem, collectPlaced(problem, jobs, best_packing));
  std::vector<Placement> placements;
  for (const NestedBlocks::Micro& micro : best) placements.push_back(micro.placement);
  std::vector<MicroBatch> batches = placedBatches(problem, jobs, placements);
  for (size_t i = 0; i < batches.size(); ++i) {
    batches[i].sequences.clear();
    for (const int32_t unit : best[i].units) batches[i].sequences.push_back(jobs[unit].sequence);
  }
  return finishPlan(problem, std::move(batches));
}

}  // namespace hdpcomm::planner
