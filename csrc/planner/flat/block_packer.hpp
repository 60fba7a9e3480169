// Packs the sequences of a step into blocks of ranks, for one target time; balanced.cpp tries
// several targets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner/flat/block_list.hpp"
#include "planner/flat/packing.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class BlockPacker {
 public:
  // The jobs are all there, in their order.
  BlockPacker(const Problem& problem, std::vector<Job>& jobs)
      : problem_(problem), cost_(problem.cost()), jobs_(jobs), filler_(cost_, jobs) {}

  // Places all jobs and returns the makespan. A run that cannot end before `limit` is given up: it
  // returns a time that is not below it.
  double run(double target, double limit = std::numeric_limits<double>::infinity()) {
    target_ = target;
    placements_.clear();
    gaps_.clear();
    makeBlocks();
    const double short_limit_s = kShortShare * target;
    size_t next = 0;
    for (; next < jobs_.size(); ++next) {
      Job& job = jobs_[next];
      if (job.min_size == 1 && job.min_size_s <= short_limit_s) break;
      if (placeInBlock(next)) continue;
      if (join(next, bestJoin(next)) >= limit) return limit;
    }
    if (filler_.leastEnd(next, gaps_, blocks_) >= limit) return limit;
    return filler_.place(next, gaps_, blocks_, limit);
  }

  // Blocks that all runs have looked at, to join some of them.
  int64_t looked() const { return looked_; }

  // The result of the last run, which this takes away; the next run uses the memory of `packing`.
  void take(Packing& packing) {
    std::swap(packing.placements, placements_);
    packing.short_jobs = filler_.take();
  }

 private:
  static constexpr int kMaxProbes = 400;  // blocks tried for one job; fewer with more ranks:
  static constexpr int kProbedRanks = 1 << 14;
  static constexpr double kShortShare = 0.2;  // of the target time, up to which a job is short
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  double speed(int rank) const noexcept { return cost_.cluster().speed(rank); }

  // One block for all neighbouring ranks of equal speed, free from the start.
  void makeBlocks() {
    blocks_.clear();
    for (int rank = 0; rank < problem_.ranks();) {
      int end = rank + 1;
      while (end < problem_.ranks() && speed(end) == speed(rank)) ++end;
      insert({0, rank, end - rank, speed(rank)});
      rank = end;
    }
  }

  // Sets the ranks on which the job is fastest, and the time on these.
  void findFastest(Job& job) {
    if (job.fastest > 0) return;
    if (job.load != last_fastest_.load || job.min_size != last_fastest_.min_size) {
      last_fastest_ = job;
      last_fastest_.fastest = cost_.fastestSize(job.load, job.min_size);
      last_fastest_.fastest_s = cost_.seconds(job.load, last_fastest_.fastest);
    }
    job.fastest = last_fastest_.fastest;
    job.fastest_s = last_fastest_.fastest_s;
  }

  // The fewest ranks, up to those on which the job is fastest, on which it takes so long at most; 0
  // if there are none.
  int fewestRanks(const Job& job, double seconds) {
    if (fewest_.seconds != seconds || fewest_.load != job.load ||
        fewest_.min_size != job.min_size) {
      fewest_ = {seconds, job.load, job.min_size,
                 cost_.sizeWithin(job.load, job.min_size, job.fastest, seconds)};
    }
    return fewest_.ranks;
  }

  // Places the job so that it ends before the target: into the block that becomes free last among
  // those where its minimum size suffices, else into the one where the fewest ranks suffice.
  bool placeInBlock(size_t index) {
    const int most_probes = kMaxProbes * kProbedRanks / std::max(kProbedRanks, problem_.ranks());
    Job& job = jobs_[index];
    const double latest = target_ - job.min_size_s;
    auto end = blocks_.upperBound(latest);
    int probes = most_probes;
    for (auto it = end; blocks_.stepBackTo(it, job.min_size, probes); --probes) {
      if (placeAt(index, it, job.min_size)) return true;
    }
    findFastest(job);
    end = blocks_.upperBound(target_ - job.fastest_s);
    auto it = blocks_.begin();
    if (it == end) return false;
    const int fewest = fewestRanks(job, target_ - it->ready);  // the first block needs no more
    if (fewest == 0) return false;
    probes = most_probes;
    for (; blocks_.stepTo(it, end, fewest, probes); ++it, --probes) {
      const int size = cost_.sizeWithin(job.load, fewest, std::min(job.fastest, it->count),
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
      if (inside(block.first)) return block.first;
      const int boundary = (block.first / ranks + 1) * ranks;
      if (boundary <= last) return boundary;
      if (inside(last)) return last;
    }
    return block.first;
  }

  // Places the job into block `at`, unless it would end after the target.
  bool placeAt(size_t index, BlockList::Iterator at, int size) {
    Job& job = jobs_[index];
    const Block block = *at;
    const int first = position(block, size);
    const double end = block.ready + cost_.secondsFrom(job.load, first, size) / block.speed;
    if (end > target_ * (1 + 1e-9)) return false;
    const Block before{block.ready, block.first, first - block.first, block.speed};
    const Block after{block.ready, first + size, block.first + block.count - first - size,
                      block.speed};
    if (before.count > 0) {
      replace(at, before);
      insert(after);
    } else if (after.count > 0) {
      replace(at, after);
    } else {
      blocks_.erase(at);
    }
    insert({end, first, size, block.speed});
    placements_.push_back({static_cast<int32_t>(index), block.ready, {first, size}, {}});
    return true;
  }

  // The blocks that a job would take, from the one that is free first on.
  struct JoinedBlocks {
    double score = kNever;
    size_t blocks = 0;
    int size = 0;
  };

  // As many as minimise idle time plus additional work plus time beyond the target.
  JoinedBlocks bestJoin(size_t index) {
    Job& job = jobs_[index];
    JoinedBlocks best;
    int count = 0;
    int next_count = job.min_size;
    double ready_area = 0;
    double slowest = 1;
    size_t blocks = 0;
    findFastest(job);
    const int most = job.fastest;
    const double shortest = job.fastest_s;
    const double least_work = job.min_size * job.min_size_s;
    double work_in_time =
        0;  // rank-seconds on the fewest ranks that end before the target, at last
    // What starts at `ready` or later, on more ranks that are no faster, has at least this score.
    const auto leastScore = [&](double ready) {
      const double idle = ready * count * (1 - 1e-9) - ready_area;
      const auto late = [&](double time) {
        return std::max(0.0, ready + time - target_) * problem_.ranks();
      };
      if (work_in_time == 0) return idle + least_work / slowest - least_work + late(shortest);
      const double on_fewest = least_work / slowest + late(job.min_size_s / slowest);
      return idle + std::min(work_in_time / slowest, on_fewest) * (1 - 1e-9) - least_work;
    };
    double checked = -1;  // ready times up to here
    for (const Block& block : blocks_) {
      ++looked_;
      if (block.ready > checked) {
        if (leastScore(block.ready) > best.score) break;
        checked = block.ready;
      }
      ++blocks;
      count += block.count;
      ready_area += block.ready * block.count;
      slowest = std::min(slowest, block.speed);
      // Trying every number of blocks takes too long; steps of a twentieth are enough.
      if (count < next_count) continue;
      next_count = count + count / 20 + 1;
      const double start = block.ready;
      const int widest = std::min(most, count);
      const double room = (target_ - start) * slowest;
      int size = 0;
      if (room >= shortest) {
        size = job.min_size_s <= room ? job.min_size
                                      : cost_.sizeWithin(job.load, job.min_size, widest, room);
      }
      const auto attempt = [&](int candidate, double seconds) {
        const double time = seconds / slowest;
        const double idle = start * count - ready_area;
        const double extra = candidate * time - least_work;
        const double late = std::max(0.0, start + time - target_) * problem_.ranks();
        const double score = idle + extra + late;
        if (score < best.score) best = {score, blocks, candidate};
      };
      const int first = size > 0 ? size : widest;
      const double seconds =
          first == job.min_size ? job.min_size_s : cost_.seconds(job.load, first);
      attempt(first, seconds);
      if (first > job.min_size) attempt(job.min_size, job.min_size_s);
      if (count >= most) break;
      if (size > 0) work_in_time = size * seconds;
      checked = -1;  // the least score has risen
    }
    return best;
  }

  // No block has room: joins some. Returns when the job ends.
  double join(size_t index, const JoinedBlocks& joined) {
    std::vector<Block>& used = used_;
    used.clear();
    for (size_t i = 0; i < joined.blocks; ++i) {
      used.push_back(*blocks_.begin());
      blocks_.erase(blocks_.begin());
    }
    const double start = used.back().ready;
    Placement placement{static_cast<int32_t>(index), start, {}, {}};
    std::vector<Block>& members = members_;
    members.clear();
    double slowest = 1;
    // Takes ranks from the block that is free last backwards, so that the ranks left over are free
    // early.
    int left = joined.size;
    for (auto it = used.rbegin(); it != used.rend(); ++it) {
      const int count = std::min(left, it->count);
      if (count > 0) {
        if (members.empty()) {
          placement.ranks = {it->first, count};
        } else {
          placement.more.push_back({it->first, count});
        }
        members.push_back({0, it->first, count, it->speed});
        slowest = std::min(slowest, it->speed);
        if (start > it->ready) gaps_.push_back({it->ready, start, it->first, count, it->speed});
      }
      insert({it->ready, it->first + count, it->count - count, it->speed});
      left -= count;
    }
    int lowest = members.front().first;
    int highest = lowest;
    for (const Block& block : members) {
      lowest = std::min(lowest, block.first);
      highest = std::max(highest, block.first + block.count - 1);
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

  void insert(const Block& block) {
    if (block.count == 0) return;
    blocks_.insert(block);
  }

  // A part of the block that is free at the same time takes its place.
  void replace(BlockList::Iterator at, const Block& part) {
    if (blocks_.replace(at, part)) return;
    blocks_.erase(at);
    insert(part);
  }

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Job>& jobs_;
  ShortFiller filler_;
  double target_ = 0;
  BlockList blocks_;
  int64_t looked_ = 0;
  std::vector<Placement> placements_;
  std::vector<Gap> gaps_;
  // What fewestRanks() and findFastest() found last: sequences as long as the one before are
  // common.
  struct Fewest {
    double seconds = -1;
    Load load;
    int min_size = 0;
    int ranks = 0;
  };
  Fewest fewest_;
  Job last_fastest_;
  std::vector<Block> used_, members_;  // of join()
};

}  // namespace hdpcomm::planner
