#include "planner/flat/waves.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "planner/flat/block_list.hpp"
#include "planner/flat/packing.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
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

}  // namespace

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

}  // namespace hdpcomm::planner
