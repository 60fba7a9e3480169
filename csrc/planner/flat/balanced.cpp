// The policy "balanced": an extension of ByteScale's DP-Balance. A block is a run
// of neighbouring ranks that become free at the same time. Sequences are placed longest first; each
// takes part of one block, with the fewest ranks on which it ends before a target time, so that no
// rank waits for another. Short sequences come last, each onto the least loaded rank. Several
// targets near the lower bound are tried, and the shortest plan is kept.
#include "planner/flat/balanced.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "planner/flat/block_list.hpp"
#include "planner/flat/block_packer.hpp"
#include "planner/flat/packing.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/model/rings.hpp"
#include "planner/search/search.hpp"
#include "planner/simulate/finish_plan.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kLongShare = 0.2;  // of the bound; sequences that take longer run in waves
constexpr int kMaxWaveJobs = 8192;  // with more of them, blocks leave little over
constexpr int kMaxWaveTrials = 16;

// Packs the sequences of a step in waves that follow each other.
class WavePacker {
 public:
  // The jobs are all there, in their order.
  WavePacker(const Problem& problem, const std::vector<Job>& jobs)
      : problem_(problem), cost_(problem.cost()), jobs_(jobs), filler_(cost_, jobs) {}

  // Places the first jobs in waves that follow each other, each over all ranks: `counts` jobs to
  // a wave, with the sizes that make the wave shortest. The other jobs have to be short. A run that
  // cannot end before `limit` is given up: it returns a time that is not below it.
  double runWaves(const std::vector<int>& counts, double limit) {
    placements_.clear();
    gaps_.clear();
    std::vector<double> ready(problem_.ranks(), 0.0);
    size_t next = 0;
    for (const int count : counts) {
      int first = 0;
      const std::vector<int> sizes = sizesOfWave(next, count);
      for (int i = 0; i < count; ++i) {
        const int size = sizes[i];
        const size_t job = next + i;
        const auto begin = ready.begin() + first;
        const double start = *std::max_element(begin, begin + size);
        forEachBlock(ready, first, first + size, [&](const Block& block) {
          if (block.ready >= start) return;
          gaps_.push_back({block.ready, start, block.first, block.count, block.speed});
        });
        const double slowest = cost_.cluster().slowest(first, size);
        const double end = start + cost_.secondsFrom(jobs_[job].load, first, size) / slowest;
        if (end >= limit) return limit;
        std::fill_n(begin, size, end);
        placements_.push_back({static_cast<int32_t>(job), start, {first, size}, {}});
        first += size;
      }
      next += count;
    }
    return fillUp(ready, next, limit);
  }

  // The result of the last run, which this takes away.
  Packing take() { return {std::exchange(placements_, {}), filler_.take()}; }

 private:
  // Sizes of `count` jobs from `next` on that run side by side, with the least longest time.
  std::vector<int> sizesOfWave(size_t next, int count) const {
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
      while (end < last && ready[end] == ready[first] &&
             cost_.cluster().speed(end) == cost_.cluster().speed(first))
        ++end;
      use(Block{ready[first], first, end - first, cost_.cluster().speed(first)});
      first = end;
    }
  }

  const Problem& problem_;
  const CostModel& cost_;
  const std::vector<Job>& jobs_;
  ShortFiller filler_;
  std::vector<Placement> placements_;
  std::vector<Gap> gaps_;
};

// How many of the jobs from `next` up to `count` run in each of `waves` waves of about equal
// numbers; more waves where their smallest sizes do not fit.
std::vector<int> waveCounts(const Problem& problem, const std::vector<Job>& jobs, int next,
                            int count, int waves) {
  std::vector<int> counts;
  while (next < count) {
    const int left = std::max(1, waves - static_cast<int>(counts.size()));
    const int wanted = (count - next + left - 1) / left;
    int taken = 0;
    for (int ranks = 0; taken < wanted; ++taken) {
      ranks += jobs[next + taken].min_size;
      if (ranks > problem.ranks()) break;
    }
    counts.push_back(taken);
    next += taken;
  }
  return counts;
}

// For a few long sequences of about the same length: in which a block is left over that is too
// small for one more of them, and too large to be wasted. Waves share all ranks out instead. A plan
// that ends before `limit`, if there is one.
std::optional<Plan> planWaves(const Problem& problem, double lower_bound, double limit) {
  std::vector<Job> jobs = makeJobs(problem);
  WavePacker packer(problem, jobs);
  const auto long_ones = std::partition_point(jobs.begin(), jobs.end(), [&](const Job& job) {
    return job.min_size > 1 || job.min_size_s > kLongShare * lower_bound;
  });
  const int count = static_cast<int>(long_ones - jobs.begin());
  if (count == 0 || count > kMaxWaveJobs) return {};
  double best = limit;
  Packing packing;
  const int fewest = static_cast<int>(waveCounts(problem, jobs, 0, count, 1).size());
  for (int tried = 0, waves = fewest; tried < kMaxWaveTrials && waves <= count; ++tried) {
    const std::vector<int> counts = waveCounts(problem, jobs, 0, count, waves);
    const double makespan = packer.runWaves(counts, best);
    if (makespan < best) {
      best = makespan;
      packing = packer.take();
    }
    waves = std::max(waves, static_cast<int>(counts.size())) + 1 + tried / 8;
  }
  if (best == limit) return {};
  return finishPlan(problem, collectPlaced(problem, jobs, packing));
}

// Makespan / lower bound below which a round of further targets is skipped, by round.
constexpr double kGoodEnough[] = {1.002, 1.008};
constexpr double kGoodGap = 0.004;        // below this, local search is not worth its time
constexpr double kRefineLimit = 1 << 15;  // sequences x ranks, for local search
// Ranks from which on a cluster is planned in parts, and those of a part at least. With half as
// many ranks plans of the whole are about as short; with parts of this size the packer looks at all
// blocks, and which of both is better varies.
constexpr int kLarge = 1 << 16;
constexpr int kRanksOfParts[] = {1 << 13, 1 << 14};
constexpr int kSpeedClasses = 256;  // of a large cluster, whose ranks would all be blocks
// How far a part's bound may lie above that of all. It does by 0.0003 at most for lengths without a
// long tail, and by 0.009 for those of byted, whose longest ones are few.
constexpr double kFair = 0.001;

// Searches for the target time that gives the shortest plan: first the lower bound, then times
// between it and the best makespan so far.
Plan planBlocks(const Problem& problem, double lower_bound) {
  std::vector<Job> jobs = makeJobs(problem);
  if (jobs.empty()) return finishPlan(problem, {});
  BlockPacker packer(problem, jobs);
  double best = std::numeric_limits<double>::infinity();
  Packing packing;
  std::vector<double> tried;  // once more they would give nothing better
  const auto attempt = [&](double target) {
    if (std::find(tried.begin(), tried.end(), target) != tried.end()) return;
    tried.push_back(target);
    const double makespan = packer.run(target, best);
    if (makespan >= best) return;
    best = makespan;
    packer.take(packing);
  };
  attempt(lower_bound * (1 + 1e-6));
  for (const double good_enough : kGoodEnough) {
    if (best <= lower_bound * good_enough) break;
    const double span = best - lower_bound;
    for (const double share : {0.1, 0.25, 0.45, 0.7}) {
      const double target = lower_bound + share * span;
      if (target >= best) break;
      attempt(target);
    }
  }
  return finishPlan(problem, collectPlaced(problem, jobs, packing));
}

// For ranks of different speeds: plans as if they lay beside each other by falling speed, so that
// those of one speed are one block, in large clusters those of about one speed, at that of the
// slowest. Groups may then cross nodes more often, which is priced.
Plan planBySpeed(const Problem& problem, double lower_bound) {
  std::vector<int32_t> ranks(problem.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  const Cluster& cluster = problem.cost().cluster();
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return cluster.speed(a) > cluster.speed(b); });
  const auto sorted = [&](int of_class) {
    Cluster by_speed = cluster;
    for (int place = 0; place < problem.ranks(); ++place) {
      const int last = std::min(problem.ranks(), (place / of_class + 1) * of_class) - 1;
      by_speed.speeds[place] = cluster.speed(ranks[last]);
    }
    return problem.onCluster(by_speed);
  };
  const auto planned = [](const Problem& part, double bound) {
    Plan plan = planBlocks(part, bound);
    if (plan.makespan > bound * (1 + kGoodGap)) {
      if (auto waves = planWaves(part, bound, plan.makespan)) plan = std::move(*waves);
    }
    return plan;
  };
  const bool large = problem.ranks() > kLarge;
  std::optional<Plan> copies;
  if (large) {
    copies =
        planCopiedPart(sorted(1), lower_bound, kFair, std::span(kRanksOfParts).last(1), planned);
  }
  Plan plan = copies ? std::move(*copies)
                     : planned(sorted(large ? problem.ranks() / kSpeedClasses : 1), lower_bound);
  for (MicroBatch& batch : plan.micro_batches) {
    for (int32_t& rank : batch.ranks) rank = ranks[rank];
    std::sort(batch.ranks.begin(), batch.ranks.end());
    batch.ranks = ringOrder(std::move(batch.ranks), cluster);
  }
  return finishPlan(problem, std::move(plan.micro_batches));
}

// Every pack runs on all ranks: no idle time, but the most transfers.
Plan planUniform(const Problem& problem) {
  PolicyOptions options;
  options.context_ranks = problem.ranks();
  const int64_t longest = *std::max_element(problem.lengths().begin(), problem.lengths().end());
  if (longest > problem.cost().memory().capacity * problem.ranks()) return planNaive(problem);
  return planStatic(problem, options);
}

constexpr Candidate<PlanSearch> kBlockCandidates[] = {
    {"copies",
     [](const PlanSearch& search) {
       return search.problem.ranks() >= kLarge && search.cluster().speeds.empty();
     },
     [](PlanSearch& search) {
       search.take(planCopiedPart(search.problem, search.lower_bound, kFair, kRanksOfParts,
                                  [&](const Problem& part, double lower_bound) {
                                    return planBalanced(part, search.options, lower_bound);
                                  }));
       search.gap_left = !search.best;
     }},
    {"blocks",
     [](const PlanSearch& search) {
       const Cluster& cluster = search.cluster();
       return !search.best && (cluster.speeds.empty() || cluster.ranks <= kLarge);
     },
     [](PlanSearch& search) { search.take(planBlocks(search.problem, search.lower_bound)); }},
    {"blocks by speed",
     [](const PlanSearch& search) { return !search.atBound() && !search.cluster().speeds.empty(); },
     [](PlanSearch& search) { search.take(planBySpeed(search.problem, search.lower_bound)); }},
};

constexpr Candidate<PlanSearch> kGapCandidates[] = {
    {"waves", [](const PlanSearch& search) { return search.gap_left; },
     [](PlanSearch& search) {
       search.take(planWaves(search.problem, search.lower_bound, search.best->makespan));
     }},
    {"all ranks",
     [](const PlanSearch& search) { return search.gap_left && search.small(kRefineLimit); },
     [](PlanSearch& search) { search.take(planUniform(search.problem)); }},
};

constexpr Candidate<PlanSearch> kImprovements[] = {
    {"local search",
     [](const PlanSearch& search) { return search.gap_left && search.small(kRefineLimit); },
     [](PlanSearch& search) {
       search.improve(
           [&](Plan plan) { return refine(search.problem, std::move(plan), search.lower_bound); });
     }},
};

}  // namespace

Plan planBalanced(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  PlanSearch search{problem, options, lower_bound};
  tryAll(kBlockCandidates, search);
  if (search.atBound()) return std::move(search).result();
  if (search.gap_left) search.gap_left = search.best->makespan > lower_bound * (1 + kGoodGap);
  tryAll(kGapCandidates, search);
  tryBaselines(search);
  tryAll(kImprovements, search);
  return std::move(search).result();
}

}  // namespace hdpcomm::planner
