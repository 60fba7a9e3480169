// Plans for ranks that are pipelines (PP-Balance of ByteScale, section 6.2), judged by the schedule
// that runs. A step is a list of *waves*: in a wave every rank runs one micro-batch, and all of
// them take about the same time. Long sequences take as many ranks as that needs, short ones are
// packed up to it. The waves grow and shrink, so that the pipelines fill and drain with small
// micro-batches. Several numbers and shapes of waves are tried.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <queue>

#include "planner/block_packer.hpp"
#include "planner/plan.hpp"
#include "planner/simulator.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kStageRefineLimit = 1 << 10;  // sequences x ranks, for local search

// How the heights of the waves rise and fall.
struct Shape {
  int waves = 1;
  int up = 0;    // waves that are lower than the highest ones at the start,
  int down = 0;  // and at the end
};

std::vector<double> relativeHeights(const Shape& shape) {
  constexpr double kGrowth = 1.5;
  constexpr double kLast = 0.45;
  std::vector<double> heights;
  for (int i = 1; i <= shape.up; ++i) heights.push_back(std::pow(kGrowth, -i));
  for (int i = 1; i <= shape.down; ++i) heights.push_back(1 - (1 - kLast) * i / shape.down);
  while (static_cast<int>(heights.size()) < shape.waves) heights.push_back(1);
  std::sort(heights.begin(), heights.end(), std::greater<>());
  return heights;
}

// Makespan of micro-batches of these times on one pipeline under 1F1B.
class Solo {
 public:
  Solo(int stages, double forward) : stages_(stages), forward_(forward) {}

  double run(const std::deque<double>& times) {
    const int count = static_cast<int>(times.size());
    const auto at = [&](int stage, int batch) { return stage * count + batch; };
    forward_end_.assign(static_cast<size_t>(stages_) * count, -1.0);
    backward_end_.assign(static_cast<size_t>(stages_) * count, -1.0);
    std::vector<int> forwards(stages_, 0);
    std::vector<int> backwards(stages_, 0);
    std::vector<double> now(stages_, 0.0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < stages_; ++stage) {
        for (;;) {
          const int done = backwards[stage];
          const bool full = forwards[stage] == count || forwards[stage] - done == stages_ - stage;
          if (full) {
            if (done == count) break;
            const double ready = stage + 1 == stages_ ? forward_end_[at(stage, done)]
                                                      : backward_end_[at(stage + 1, done)];
            if (ready < 0) break;
            now[stage] = std::max(now[stage], ready) + (1 - forward_) * times[done];
            backward_end_[at(stage, done)] = now[stage];
            ++backwards[stage];
          } else {
            const int next = forwards[stage];
            const double ready = stage == 0 ? 0 : forward_end_[at(stage - 1, next)];
            if (ready < 0) break;
            now[stage] = std::max(now[stage], ready) + forward_ * times[next];
            forward_end_[at(stage, next)] = now[stage];
            ++forwards[stage];
          }
          moved = true;
        }
      }
    }
    return now[0];
  }

 private:
  const int stages_;
  const double forward_;
  std::vector<double> forward_end_, backward_end_;
};

struct Wave {
  double height = 0;
  std::vector<MicroBatch> wide;             // on several ranks
  int used = 0;                             // ranks of these
  std::vector<std::vector<int32_t>> packs;  // of the other ranks
};

class WavePlanner {
 public:
  explicit WavePlanner(const Problem& problem)
      : problem_(problem), cost_(problem.cost()), jobs_(makeJobs(problem)) {
    for (const Job& job : jobs_) work_ += job.min_size * job.min_size_s;
    const Cluster& cluster = cost_.cluster();
    by_speed_.resize(problem.ranks());
    std::iota(by_speed_.begin(), by_speed_.end(), 0);
    std::stable_sort(by_speed_.begin(), by_speed_.end(),
                     [&](int a, int b) { return cluster.speed(a) > cluster.speed(b); });
    for (const int rank : by_speed_) {
      speeds_.push_back(cluster.speed(rank));
      ranks_ += speeds_.back();
    }
  }

  // About the seconds of a rank, on the smallest sizes.
  double meanWork() const { return work_ / ranks_; }

  std::vector<MicroBatch> plan(const Shape& shape, double slack) {
    std::vector<double> heights = relativeHeights(shape);
    double sum = 0;
    for (const double height : heights) sum += height;
    unit_ = meanWork() * (1 + slack) / sum;
    used_.assign(jobs_.size(), false);
    waves_.clear();
    for (const double height : heights) addWave(unit_ * height);
    while (hasWide()) addWave(unit_);
    fillPacks();
    return ordered();
  }

 private:
  bool single(const Job& job, double height) const {
    return job.min_size == 1 && job.min_size_s <= height;
  }

  bool hasWide() const {
    for (size_t i = 0; i < jobs_.size() && !single(jobs_[i], unit_); ++i) {
      if (!used_[i]) return true;
    }
    return false;
  }

  // The longest sequences that are left and need several ranks to end within the height, or more
  // than that: those that end in time nowhere make the wave higher.
  void addWave(double height) {
    Wave wave;
    wave.height = height;
    int misses = 0;
    for (size_t i = 0; i < jobs_.size() && wave.used < problem_.ranks(); ++i) {
      if (used_[i]) continue;
      const Job& job = jobs_[i];
      if (single(job, height)) break;
      const int left = problem_.ranks() - wave.used;
      if (job.min_size > left) continue;
      int size = sizeWithin(job, wave.used, wave.height);
      if (size == 0 && wave.used == 0 && tooHigh(job)) {
        size = fastestSize(job);
      }
      if (size == 0) {
        if (++misses > kMaxMisses) break;
        continue;
      }
      used_[i] = true;
      MicroBatch batch;
      batch.ranks = ringOrder(ranksFrom(wave.used, size));
      batch.sequences = problem_.withRiders(job.sequence);
      batch.start = cost_.seconds(job.load, size) / speeds_[wave.used + size - 1];
      wave.height = std::max(wave.height, batch.start);
      wave.used += size;
      wave.wide.push_back(std::move(batch));
    }
    wave.packs.resize(problem_.ranks() - wave.used);
    waves_.push_back(std::move(wave));
  }

  // Fewest ranks from place `first` on, fastest ranks first, on which the job ends within the
  // height; 0 if there are none.
  int sizeWithin(const Job& job, int first, double height) const {
    const int left = problem_.ranks() - first;
    int size = cost_.sizeWithin(job.load, job.min_size, left, height * speeds_[first]);
    while (size > 0 &&
           speeds_[first + size - 1] < speeds_[first]) {  // at the speed of the last one
      const int more = cost_.sizeWithin(job.load, size, left, height * speeds_[first + size - 1]);
      if (more == size) break;
      size = more;
    }
    return size;
  }

  // The fastest number of the fastest ranks.
  int fastestSize(const Job& job) const {
    int best = cost_.fastestSize(job.load, job.min_size);
    const auto seconds = [&](int size) {
      return cost_.seconds(job.load, size) / speeds_[size - 1];
    };
    for (int size = best - 1; size >= job.min_size && !cost_.cluster().speeds.empty(); --size) {
      if (seconds(size) < seconds(best)) best = size;
    }
    return best;
  }

  std::vector<int32_t> ranksFrom(int first, int count) const {
    std::vector<int32_t> ranks(by_speed_.begin() + first, by_speed_.begin() + first + count);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  // Whether a sequence ends within the unit on no number of ranks.
  bool tooHigh(const Job& job) const { return sizeWithin(job, 0, unit_) == 0; }

  // Deals the short sequences to the packs, longest first, each to the pack that lacks most.
  void fillPacks() {
    double work = 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (!used_[i]) work += jobs_[i].min_size_s;
    }
    if (work <= 0) return;
    const double full = fullPackSeconds();
    double room = 0;
    const auto count = [&](const Wave& wave) {
      if (cost_.cluster().speeds.empty()) {
        room += std::min(wave.height, full) * static_cast<double>(wave.packs.size());
        return;
      }
      for (size_t k = 0; k < wave.packs.size(); ++k) room += packSeconds(wave, k, full);
    };
    for (const Wave& wave : waves_) count(wave);
    while (room < work) {
      addWave(std::min(unit_, full));
      count(waves_.back());
    }
    const double scale = work / room;
    using Entry = std::pair<double, std::pair<int, int>>;  // (seconds lacking, (wave, pack))
    std::vector<Entry> entries;
    for (size_t w = 0; w < waves_.size(); ++w) {
      for (size_t k = 0; k < waves_[w].packs.size(); ++k) {
        entries.push_back(
            {scale * packSeconds(waves_[w], k, full), {static_cast<int>(w), static_cast<int>(k)}});
      }
    }
    std::priority_queue<Entry> lacking(std::less<Entry>(), std::move(entries));
    std::vector<std::vector<double>> tokens;
    for (const Wave& wave : waves_) tokens.emplace_back(wave.packs.size(), 0.0);
    const double capacity = static_cast<double>(cost_.memory().capacity);
    std::vector<Entry> passed;
    std::vector<int32_t> left_over;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (used_[i]) continue;
      const Job& job = jobs_[i];
      passed.clear();
      bool placed = false;
      while (!placed && !lacking.empty() && passed.size() < kMaxProbes) {
        Entry entry = lacking.top();
        lacking.pop();
        const auto [w, k] = entry.second;
        if (tokens[w][k] + job.load.tokens <= capacity) {
          tokens[w][k] += job.load.tokens;
          waves_[w].packs[k].push_back(job.sequence);
          entry.first -= job.min_size_s - cost_.params().fixed;
          placed = true;
        }
        passed.push_back(entry);
      }
      for (const Entry& entry : passed) {
        const auto [w, k] = entry.second;
        if (tokens[w][k] < capacity) lacking.push(entry);
      }
      if (!placed) left_over.push_back(job.sequence);
    }
    addLeftOver(left_over);
  }

  // Seconds of a pack at full speed that end with the wave on its rank; `full`: most.
  double packSeconds(const Wave& wave, size_t pack, double full) const {
    return std::min(wave.height * speeds_[wave.used + pack], full);
  }

  // Packs that no wave has room for: waves of their own.
  void addLeftOver(const std::vector<int32_t>& sequences) {
    if (sequences.empty()) return;
    auto bins = packBestFit(problem_.lengths(), sequences, cost_.memory().capacity);
    for (size_t i = 0; i < bins.size(); ++i) {
      const size_t place = i % static_cast<size_t>(problem_.ranks());
      if (place == 0) {
        Wave wave;
        wave.packs.resize(problem_.ranks());
        waves_.push_back(std::move(wave));
      }
      waves_.back().packs[place] = std::move(bins[i]);
    }
  }

  // Seconds of a pack of short sequences that is as full as memory allows.
  double fullPackSeconds() const {
    double seconds = 0;
    double tokens = 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (used_[i]) continue;
      seconds += jobs_[i].min_size_s - cost_.params().fixed;
      tokens += jobs_[i].load.tokens;
    }
    const double capacity = static_cast<double>(cost_.memory().capacity);
    return 0.97 * capacity * seconds / tokens + cost_.params().fixed;
  }

  // The micro-batches of all waves, in the order that drains and fills a pipeline fastest.
  std::vector<MicroBatch> ordered() {
    for (Wave& wave : waves_) {
      wave.height = 0;
      for (const MicroBatch& batch : wave.wide) wave.height = std::max(wave.height, batch.start);
      for (size_t k = 0; k < wave.packs.size(); ++k) {
        const auto& pack = wave.packs[k];
        Load load;
        for (const int32_t sequence : pack) load.add(problem_.lengths()[sequence]);
        if (pack.empty()) continue;
        wave.height = std::max(wave.height, cost_.seconds(load, 1) / speeds_[wave.used + k]);
      }
    }
    std::stable_sort(waves_.begin(), waves_.end(),
                     [](const Wave& a, const Wave& b) { return a.height > b.height; });
    // From the highest wave outwards: each goes to the end where it costs less.
    Solo solo(cost_.cluster().pipeline, cost_.params().forward);
    std::deque<double> times;
    std::deque<size_t> order;
    for (size_t w = 0; w < waves_.size(); ++w) {
      times.push_front(waves_[w].height);
      const double front = solo.run(times);
      times.pop_front();
      times.push_back(waves_[w].height);
      if (solo.run(times) <= front) {
        order.push_back(w);
      } else {
        times.pop_back();
        times.push_front(waves_[w].height);
        order.push_front(w);
      }
    }
    std::vector<MicroBatch> batches;
    for (size_t place = 0; place < order.size(); ++place) {
      Wave& wave = waves_[order[place]];
      for (size_t k = 0; k < wave.packs.size(); ++k) {
        if (wave.packs[k].empty()) continue;
        MicroBatch batch;
        batch.ranks = {by_speed_[wave.used + k]};
        batch.sequences = std::move(wave.packs[k]);
        wave.wide.push_back(std::move(batch));
      }
      for (MicroBatch& batch : wave.wide) {
        batch.start = static_cast<double>(place);
        batches.push_back(std::move(batch));
      }
    }
    return batches;
  }

  static constexpr int kMaxMisses = 64;
  static constexpr size_t kMaxProbes = 8;

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Job> jobs_;          // by falling length
  std::vector<int32_t> by_speed_;  // ranks, fastest first
  std::vector<double> speeds_;     // of these
  double ranks_ = 0;               // the sum of the speeds
  double work_ = 0;
  double unit_ = 0;
  std::vector<bool> used_;
  std::vector<Wave> waves_;
};

}  // namespace

Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  Plan best = finishPlan(problem, {});
  if (problem.count() == 0) return best;
  best.makespan = std::numeric_limits<double>::infinity();
  const auto take = [&](Plan other) {
    if (other.makespan < best.makespan) best = std::move(other);
  };
  WavePlanner waves(problem);
  const int stages = problem.cost().cluster().pipeline;
  Shape best_shape;
  const auto attempt = [&](Shape shape, double slack) {
    shape.up = std::min(shape.up, shape.waves / 3);
    shape.down = std::min(shape.down, shape.waves / 3);
    Plan found = finishPlan(problem, waves.plan(shape, slack));
    if (found.makespan < best.makespan) best_shape = shape;
    take(std::move(found));
  };
  for (const int count : {1, 2, 3, 4, 6, 8, 11, 14, 18, 24, 32}) {
    if (count <= 4) attempt({count, 0, 0}, 0.04);
    if (count > 2) attempt({count, stages, stages}, 0.04);
    if (best.makespan <= lower_bound * (1 + 1e-9)) return best;
  }
  const Shape shape = best_shape;
  for (const int more : {-2, -1, 1, 2}) {
    if (shape.waves + more > 0) attempt({shape.waves + more, shape.up, shape.down}, 0.04);
  }
  attempt({best_shape.waves, 0, 0}, 0.04);
  attempt({best_shape.waves, 2 * stages, stages}, 0.04);
  for (const double slack : {0.01, 0.025, 0.06, 0.09}) attempt(best_shape, slack);
  // Never worse than another policy. Most of these plans need not be made to know that.
  if (leastNaive(problem) < best.makespan) take(planNaive(problem));
  if (leastPow2(problem) < best.makespan) take(planPow2(problem));
  if (leastStatic(problem, options) < best.makespan) take(planStatic(problem, options));
  const bool small = static_cast<double>(problem.count()) * problem.ranks() <= kStageRefineLimit;
  return small ? refine(problem, std::move(best), lower_bound) : best;
}

}  // namespace hdpcomm::planner
