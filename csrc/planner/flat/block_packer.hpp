// Packs the sequences of a step into blocks of ranks, for one target time; balanced.cpp tries
// several targets.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "planner/flat/block_list.hpp"
#include "planner/flat/short_filler.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

struct Placement {
  int32_t job = 0;
  double start = 0;
  std::vector<std::pair<int, int>> ranges;  // (first rank, count)
};

// Where all jobs of a run are.
struct Packing {
  std::vector<Placement> placements;
  ShortJobs short_jobs;
};

class BlockPacker {
 public:
  // The jobs are all there, in their order. `on_borders`: groups of several nodes or domains begin
  // with a whole one where their block allows it, so that fewer rings share the links of one.
  BlockPacker(const Problem& problem, std::vector<Job>& jobs, bool on_borders = false)
      : problem_(problem),
        cost_(problem.cost()),
        jobs_(jobs),
        filler_(cost_, jobs),
        on_borders_(on_borders) {}

  // Places all jobs and returns the makespan; placements() and slots() hold the result. With
  // `fill`, a job that would take more than half of its block takes all of it: jobs that are too
  // wide to run side by side then follow each other without a gap.
  // A run that cannot end before `limit` is given up: it returns a time that is not below it.
  double run(double target, bool fill, double limit = std::numeric_limits<double>::infinity()) {
    target_ = target;
    fill_ = fill;
    placements_.clear();
    gaps_.clear();
    makeBlocks();
    const double short_limit_s = kShortShare * target;
    size_t next = 0;
    for (; next < jobs_.size(); ++next) {
      Job& job = jobs_[next];
      if (job.min_size == 1 && job.min_size_s <= short_limit_s) break;
      if (placeInGap(next) || placeInBlock(next)) continue;
      if (placeAnywhere(next) >= limit) return limit;
    }
    if (filler_.leastEnd(next, gaps_, blocks_) >= limit) return limit;
    return filler_.place(next, gaps_, blocks_, limit);
  }

  // Places the first jobs in waves that follow each other, each over all ranks: `counts` jobs to
  // a wave, with the sizes that make the wave shortest. The other jobs have to be short. With
  // `turned`, every other wave has its longest jobs at the other end, and the sizes of the last one
  // make all of its jobs end together. Gives up like run().
  double runWaves(const std::vector<int>& counts, bool turned, double limit) {
    placements_.clear();
    gaps_.clear();
    std::vector<double> ready(problem_.ranks(), 0.0);
    size_t next = 0;
    bool backwards = false;
    for (const int count : counts) {
      int first = 0;
      std::vector<int> sizes = sizesOfWave(next, count);
      if (turned && &count == &counts.back())
        sizes = levelSizes(next, std::move(sizes), backwards, ready);
      for (int i = 0; i < count; ++i) {
        const int place = backwards ? count - 1 - i : i;
        const int size = sizes[place];
        const size_t job = next + place;
        const auto begin = ready.begin() + first;
        const double start = *std::max_element(begin, begin + size);
        forEachBlock(ready, first, first + size, [&](const Block& block) {
          if (block.ready >= start) return;
          gaps_.push_back({block.ready, start, block.first, block.count, block.speed});
        });
        const double slowest = cost_.cluster().slowest(first, size);
        const double end = start + seconds(jobs_[job], first, size) / slowest;
        if (end >= limit) return limit;
        std::fill_n(begin, size, end);
        placements_.push_back({static_cast<int32_t>(job), start, {{first, size}}});
        first += size;
      }
      next += count;
      backwards = turned && !backwards;
    }
    return fillUp(ready, next, limit);
  }

  // Places the jobs from `next` on, all of them short, around those that are placed already;
  // `ready`: when these leave each rank free.
  double runPlaced(std::vector<Placement> placements, const std::vector<double>& ready,
                   size_t next) {
    placements_ = std::move(placements);
    gaps_.clear();
    return fillUp(ready, next, kNever);
  }

  // The result of the last run, which this takes away.
  Packing take() { return {std::exchange(placements_, {}), filler_.take()}; }

 private:
  static constexpr int kMaxProbes = 400;  // blocks tried for one job; fewer with more ranks:
  static constexpr int kProbedRanks = 1 << 14;
  static constexpr double kShortShare = 0.2;  // of the target time, up to which a job is short
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // Sizes of `count` jobs from `next` on that run side by side, with the least longest time.
  const std::vector<int>& sizesOfWave(size_t next, int count) {
    std::vector<int>& sizes = wave_sizes_[{next, count}];
    if (sizes.empty()) sizes = findSizes(next, count);
    return sizes;
  }

  std::vector<int> findSizes(size_t next, int count) const {
    std::vector<int> sizes(count);  // the smallest ones, which the caller knows to fit
    double low = 0;
    double high = 0;
    int taken = 0;
    for (int i = 0; i < count; ++i) {
      sizes[i] = jobs_[next + i].min_size;
      taken += sizes[i];
      high = std::max(high, jobs_[next + i].min_size_s);
    }
    // In less time than that of `sizes`, of which no job takes fewer ranks.
    const auto fit = [&](double limit, std::vector<int>& found, int& all) {
      all = taken;
      for (int i = 0; i < count; ++i) {
        const Job& job = jobs_[next + i];
        const bool same = i > 0 && job.load.squares == jobs_[next + i - 1].load.squares;
        const int size =
            same ? found[i - 1] : cost_.sizeWithin(job.load, sizes[i], problem_.ranks(), limit);
        all += size - sizes[i];
        if (size == 0 || all > problem_.ranks()) return false;
        found[i] = size;
      }
      return true;
    };
    std::vector<int> tried(count);
    for (int step = 0, all = 0; step < 12; ++step) {
      const double middle = 0.5 * (low + high);
      if (fit(middle, tried, all)) {
        taken = all;
        high = middle;
        sizes = tried;
      } else {
        low = middle;
      }
    }
    return sizes;
  }

  // Sizes of jobs from `next` on, side by side on ranks that are free at different times, with
  // which the last one of them ends as early as possible. `sizes` are some that fit; `backwards`:
  // the last job comes first.
  std::vector<int> levelSizes(size_t next, std::vector<int> sizes, bool backwards,
                              const std::vector<double>& ready) const {
    if (!cost_.cluster().speeds.empty()) return sizes;
    const auto count = static_cast<int>(sizes.size());
    // When the last job ends with the sizes that `choose` picks by place and first rank; never if
    // it picks 0.
    const auto run = [&](const auto& choose) {
      double last = 0;
      int first = 0;
      for (int i = 0; i < count; ++i) {
        const int place = backwards ? count - 1 - i : i;
        const int size = choose(place, first);
        if (size == 0 || first + size > problem_.ranks()) return kNever;
        last = std::max(last, endAt(jobs_[next + place], first, size, ready));
        first += size;
      }
      return last;
    };
    double high = run([&](int place, int) { return sizes[place]; });
    double low = *std::min_element(ready.begin(), ready.end());
    std::vector<int> tried(count);
    for (int step = 0; step < 14; ++step) {
      const double target = 0.5 * (low + high);
      const double last = run([&](int place, int first) {
        return tried[place] = sizeAt(jobs_[next + place], first, ready, target);
      });
      if (last < high) {
        high = last;
        sizes = tried;
      } else {
        low = target;
      }
    }
    return sizes;
  }

  double endAt(const Job& job, int first, int size, const std::vector<double>& ready) const {
    const auto begin = ready.begin() + first;
    return *std::max_element(begin, begin + size) + seconds(job, first, size);
  }

  // The fewest ranks from `first` on with which the job ends by a target time; 0 if there are none.
  int sizeAt(const Job& job, int first, const std::vector<double>& ready, double target) const {
    constexpr int kMaxTries = 8;
    int least = job.min_size;
    for (int tried = 0; tried < kMaxTries; ++tried) {
      const int left = problem_.ranks() - first;
      if (least > left) return 0;
      const auto begin = ready.begin() + first;
      const double start = *std::max_element(begin, begin + least);
      const int size = cost_.sizeWithin(job.load, least, left, target - start);
      if (size == 0) return 0;
      if (endAt(job, first, size, ready) <= target) return size;
      least = std::max(size, least + 1);
    }
    return 0;
  }

  double speed(size_t rank) const noexcept { return cost_.cluster().speed(static_cast<int>(rank)); }

  double fillUp(const std::vector<double>& ready, size_t next, double limit) {
    std::vector<Block> blocks;
    forEachBlock(ready, 0, problem_.ranks(), [&](const Block& block) { blocks.push_back(block); });
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const Block& a, const Block& b) { return a.ready < b.ready; });
    if (filler_.leastEnd(next, gaps_, blocks) >= limit) return limit;
    return filler_.place(next, gaps_, blocks, limit);
  }

  // Calls `use(block)` for the neighbouring ranks of one speed that are free at the same time.
  template <class Use>
  void forEachBlock(const std::vector<double>& ready, int first, int last, const Use& use) const {
    while (first < last) {
      int end = first + 1;
      while (end < last && ready[end] == ready[first] && speed(end) == speed(first)) ++end;
      use(Block{ready[first], first, end - first, speed(first)});
      first = end;
    }
  }

  // One block for all neighbouring ranks of equal speed, free from the start.
  void makeBlocks() {
    blocks_.clear();
    for (int rank = 0; rank < problem_.ranks();) {
      int end = rank + 1;
      while (end < problem_.ranks() && speed(end) == speed(rank)) ++end;
      blocks_.insert({0, rank, end - rank, speed(rank)});
      rank = end;
    }
  }

  int fastest(Job& job) {
    if (job.fastest == 0) job.fastest = cost_.fastestSize(job.load, job.min_size);
    return job.fastest;
  }

  // Places the job into the shortest gap that it fits into, if there is one.
  bool placeInGap(size_t index) {
    const Job& job = jobs_[index];
    size_t best = gaps_.size();
    double best_room = std::numeric_limits<double>::infinity();
    for (size_t i = gaps_.size() - std::min<size_t>(gaps_.size(), kMaxProbes); i < gaps_.size();
         ++i) {
      const Gap& gap = gaps_[i];
      const double room = (gap.until - gap.start) * gap.speed;
      if (gap.count < job.min_size || room >= best_room || room < job.min_size_s) continue;
      if (room < seconds(job, gap.first, job.min_size)) continue;
      best = i;
      best_room = room;
    }
    if (best == gaps_.size()) return false;
    const Gap gap = gaps_[best];
    const int size = job.min_size;
    const double end = gap.start + seconds(job, gap.first, size) / gap.speed;
    gaps_[best] = {end, gap.until, gap.first, size, gap.speed};
    if (gap.count > size) {
      gaps_.push_back({gap.start, gap.until, gap.first + size, gap.count - size, gap.speed});
    }
    placements_.push_back({static_cast<int32_t>(index), gap.start, {{gap.first, size}}});
    return true;
  }

  // On neighbouring ranks of full speed.
  double seconds(const Job& job, int first, int size) const {
    return cost_.seconds(job.load, size, cost_.cluster().scope(first, first + size - 1));
  }

  // Places the job so that it ends before the target: into the block that becomes free last among
  // those where its minimum size suffices, else into the one where the fewest ranks suffice.
  bool placeInBlock(size_t index) {
    const int most_probes = kMaxProbes * kProbedRanks / std::max(kProbedRanks, problem_.ranks());
    Job& job = jobs_[index];
    const double latest = target_ - job.min_size_s;
    auto end = blocks_.upperBound(latest);
    int probes = most_probes;
    for (auto it = end; it != blocks_.begin() && probes > 0; --probes) {
      --it;
      if (it->count < job.min_size) continue;
      if (placeAt(index, it, job.min_size)) return true;
    }
    const int most = fastest(job);
    const double shortest = cost_.seconds(job.load, most);
    end = blocks_.upperBound(target_ - shortest);
    probes = most_probes;  // the first block needs the fewest ranks
    for (auto it = blocks_.begin(); it != end && probes > 0; ++it, --probes) {
      if (it->count < job.min_size) continue;
      const int size = cost_.sizeWithin(job.load, job.min_size, std::min(most, it->count),
                                        (target_ - it->ready) * it->speed);
      if (size > 0 && placeAt(index, it, size)) return true;
    }
    return false;
  }

  // First rank of a group in a block: inside one node if it fits into one, else inside one domain,
  // else the block's start.
  int position(const Block& block, int size) const {
    const int last = block.first + block.count - size;
    for (const int ranks : {cost_.cluster().ranks_per_node, cost_.cluster().ranks_per_domain}) {
      if (size > ranks) continue;
      const auto inside = [&](int first) { return first / ranks == (first + size - 1) / ranks; };
      const int border = roundUp(block.first, cost_.cluster().ranks_per_node);
      if (on_borders_ && size > cost_.cluster().ranks_per_node && border <= last &&
          inside(border)) {
        return border;
      }
      if (inside(block.first)) return block.first;
      const int boundary = (block.first / ranks + 1) * ranks;
      if (boundary <= last) return boundary;
      if (inside(last)) return last;
    }
    for (const int ranks : {cost_.cluster().ranks_per_domain, cost_.cluster().ranks_per_node}) {
      if (!on_borders_ || ranks == 0 || size <= ranks) continue;
      const int border = roundUp(block.first, ranks);
      if (border <= last) return border;
    }
    return block.first;
  }

  static int roundUp(int rank, int ranks) { return (rank + ranks - 1) / ranks * ranks; }

  // Places the job into block `at`, unless it would end after the target.
  bool placeAt(size_t index, BlockList::Iterator at, int size) {
    Job& job = jobs_[index];
    const Block block = *at;
    if (fill_ && job.min_size > 1 && block.count < 2 * size && block.count <= fastest(job)) {
      size = block.count;
    }
    const int first = position(block, size);
    const double end = block.ready + seconds(job, first, size) / block.speed;
    if (end > target_ * (1 + 1e-9)) return false;
    blocks_.erase(at);
    insert({block.ready, block.first, first - block.first, block.speed});
    insert({block.ready, first + size, block.first + block.count - first - size, block.speed});
    insert({end, first, size, block.speed});
    placements_.push_back({static_cast<int32_t>(index), block.ready, {{first, size}}});
    return true;
  }

  // No block has room: joins the blocks that become free first, as many as minimise idle time plus
  // additional work plus time beyond the target; of all of them, or of those that are fast enough.
  // Returns when the job ends.
  double placeAnywhere(size_t index) {
    if (cost_.cluster().neighbours) return joinNeighbours(index);
    JoinedBlocks best;
    for (const double least_speed : speedLimits())
      best = std::min(best, bestJoin(index, least_speed));
    return join(index, best);
  }

  // The blocks of at least a speed that a job would take, from the one that is free first on.
  struct JoinedBlocks {
    double score = std::numeric_limits<double>::infinity();
    double least_speed = 0;
    size_t blocks = 0;
    int size = 0;
    bool operator<(const JoinedBlocks& other) const { return score < other.score; }
  };

  JoinedBlocks bestJoin(size_t index, double least_speed) {
    Job& job = jobs_[index];
    JoinedBlocks best;
    best.least_speed = least_speed;
    int count = 0;
    int next_count = job.min_size;
    double ready_area = 0;
    double slowest = 1;
    size_t blocks = 0;
    const int most = fastest(job);
    for (const Block& block : blocks_) {
      if (block.speed < least_speed) continue;
      ++blocks;
      count += block.count;
      ready_area += block.ready * block.count;
      slowest = std::min(slowest, block.speed);
      // Trying every number of blocks takes too long; steps of a twentieth are enough.
      if (count < next_count) continue;
      next_count = count + count / 20 + 1;
      const double start = block.ready;
      const int widest = std::min(most, count);
      const int size =
          cost_.sizeWithin(job.load, job.min_size, widest, (target_ - start) * slowest);
      for (const int candidate : {size > 0 ? size : widest, job.min_size}) {
        const double time = cost_.seconds(job.load, candidate) / slowest;
        const double idle =
            start * count - ready_area - (count - candidate) * (start - block.ready);
        const double extra = candidate * time - job.min_size * job.min_size_s;
        const double late = std::max(0.0, start + time - target_) * problem_.ranks();
        const double score = idle + extra + late;
        if (score < best.score) best = {score, least_speed, blocks, candidate};
      }
      if (count >= most) break;
    }
    return best;
  }

  const std::vector<double>& speedLimits() {
    if (speed_limits_.empty()) speed_limits_ = cost_.cluster().speedLimits();
    return speed_limits_;
  }

  double join(size_t index, const JoinedBlocks& joined) {
    std::vector<Block> used;
    for (auto it = blocks_.begin(); used.size() < joined.blocks;) {
      const bool taken = it->speed >= joined.least_speed;
      if (taken) {
        used.push_back(*it);
        it = blocks_.erase(it);
      } else {
        ++it;
      }
    }
    const double start = used.back().ready;
    Placement placement{static_cast<int32_t>(index), start, {}};
    std::vector<Block> members;
    double slowest = 1;
    // Takes ranks from the block that is free last backwards, so that the ranks left over are free
    // early.
    int left = joined.size;
    for (auto it = used.rbegin(); it != used.rend(); ++it) {
      const int count = std::min(left, it->count);
      if (count > 0) {
        placement.ranges.push_back({it->first, count});
        members.push_back({0, it->first, count, it->speed});
        slowest = std::min(slowest, it->speed);
        if (start > it->ready) gaps_.push_back({it->ready, start, it->first, count, it->speed});
      }
      insert({it->ready, it->first + count, it->count - count, it->speed});
      left -= count;
    }
    int lowest = placement.ranges[0].first;
    int highest = lowest;
    for (const auto& [first, count] : placement.ranges) {
      lowest = std::min(lowest, first);
      highest = std::max(highest, first + count - 1);
    }
    const Scope scope = cost_.cluster().scope(lowest, highest);
    const double end = start + cost_.seconds(jobs_[index].load, joined.size, scope) / slowest;
    for (Block& block : members) {
      block.ready = end;
      insert(block);
    }
    placements_.push_back(std::move(placement));
    return end;
  }

  // placeAnywhere() for groups of neighbouring ranks: of all windows over them that begin or end
  // where a block does, in steps of a fifth of their size, the one with the best score.
  double joinNeighbours(size_t index) {
    Job& job = jobs_[index];
    std::vector<Block> blocks;
    for (const Block& block : blocks_) blocks.push_back(block);
    std::sort(blocks.begin(), blocks.end(),
              [](const Block& a, const Block& b) { return a.first < b.first; });
    Window best;
    for (int size = job.min_size;; size = std::min(size + size / 5 + 1, fastest(job))) {
      for (size_t i = 0; i < blocks.size(); ++i) {
        best = std::min(best, windowAt(job, blocks, i, blocks[i].first, size));
        const int first = blocks[i].first + blocks[i].count - size;
        size_t from = i;
        while (from > 0 && blocks[from].first > first) --from;
        if (first >= 0) best = std::min(best, windowAt(job, blocks, from, first, size));
      }
      if (size >= fastest(job)) break;
    }
    const int end = best.first + best.size;
    for (auto it = blocks_.begin(); it != blocks_.end();) {
      it = it->first < end && it->first + it->count > best.first ? blocks_.erase(it) : ++it;
    }
    for (const Block& block : blocks) {
      const int block_end = block.first + block.count;
      const int from = std::max(block.first, best.first);
      const int to = std::min(block_end, end);
      if (from >= to) continue;
      insert({block.ready, block.first, from - block.first, block.speed});
      insert({block.ready, to, block_end - to, block.speed});
      if (best.start > block.ready) {
        gaps_.push_back({block.ready, best.start, from, to - from, block.speed});
      }
    }
    for (int first = best.first; first < end;) {  // neighbours of one speed
      int next = first + 1;
      while (next < end && speed(next) == speed(first)) ++next;
      insert({best.end, first, next - first, speed(first)});
      first = next;
    }
    placements_.push_back({static_cast<int32_t>(index), best.start, {{best.first, best.size}}});
    return best.end;
  }

  // Ranks that a job would take, and when.
  struct Window {
    double score = kNever;
    double start = 0;
    double end = 0;
    int first = 0;
    int size = 0;
    bool operator<(const Window& other) const { return score < other.score; }
  };

  // The window from rank `first` on, which lies in block `from`; none if there are too few ranks.
  Window windowAt(const Job& job, const std::vector<Block>& blocks, size_t from, int first,
                  int size) const {
    if (first + size > problem_.ranks()) return {};
    Window window{0, 0, 0, first, size};
    double ready_area = 0;
    double slowest = 1;
    for (size_t i = from; i < blocks.size() && blocks[i].first < first + size; ++i) {
      const Block& block = blocks[i];
      const int end = std::min(block.first + block.count, first + size);
      ready_area += block.ready * (end - std::max(block.first, first));
      window.start = std::max(window.start, block.ready);
      slowest = std::min(slowest, block.speed);
    }
    const double time = seconds(job, first, size) / slowest;
    window.end = window.start + time;
    const double idle = window.start * size - ready_area;
    const double extra = size * time - job.min_size * job.min_size_s;
    window.score = idle + extra + std::max(0.0, window.end - target_) * problem_.ranks();
    return window;
  }

  void insert(const Block& block) {
    if (block.count > 0) blocks_.insert(block);
  }

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Job>& jobs_;
  ShortFiller filler_;
  const bool on_borders_;
  double target_ = 0;
  bool fill_ = false;
  BlockList blocks_;
  std::vector<Placement> placements_;
  std::vector<Gap> gaps_;
  std::vector<double> speed_limits_;
  std::map<std::pair<size_t, int>, std::vector<int>> wave_sizes_;  // of sizesOfWave()
};

// The micro-batch of each placement.
std::vector<MicroBatch> placedBatches(const Problem& problem, const std::vector<Job>& jobs,
                                      const std::vector<Placement>& placements);

// The micro-batches of all jobs.
std::vector<MicroBatch> collectPlaced(const Problem& problem, const std::vector<Job>& jobs,
                                      const Packing& packing);

}  // namespace hdpcomm::planner
