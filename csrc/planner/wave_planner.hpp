// Plans for pipelines as lists of waves: in a wave every rank runs one micro-batch, and all of them
// take about the same time. Long sequences take as many ranks as that needs, short ones are packed
// up to it. The waves grow and shrink, so that the pipelines fill and drain with small
// micro-batches. The longest sequences may have ranks of their own, which run few other waves.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <queue>

#include "planner/block_packer.hpp"
#include "planner/solo.hpp"
#include "planner/wave_shape.hpp"

namespace hdpcomm::planner {

// Micro-batches side by side on neighbouring places, fastest ranks first.
struct Wave {
  struct Wide {  // on several ranks
    size_t job;
    int size;
    double seconds;
  };

  int first = 0;
  int last = 0;  // the place after the last one
  double height = 0;
  std::vector<Wide> wide;
  int used = 0;                             // the place after their ranks
  std::vector<std::vector<int32_t>> packs;  // of the ranks from there on
  bool turned = false;                      // lies on its ranks the other way round
};

class WavePlanner {
 public:
  explicit WavePlanner(const Problem& problem)
      : problem_(problem),
        cost_(problem.cost()),
        jobs_(makeJobs(problem)),
        ramps_(cost_, forwardShare(cost_), forwardShare(cost_), 0) {
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

  // The least time in which the longest sequences, this many, can run side by side; 0 if there are
  // too few ranks or sequences.
  double timeTogether(int count) const {
    if (count > static_cast<int>(jobs_.size())) return 0;
    int least = 0;
    double low = 0;
    for (int i = 0; i < count; ++i) {
      least += jobs_[i].min_size;
      low = std::max(low, cost_.seconds(jobs_[i].load, fastestSize(jobs_[i], 0, problem_.ranks())));
    }
    if (least > problem_.ranks()) return 0;
    const auto fit = [&](double height) {
      int place = 0;
      for (int i = 0; i < count; ++i) {
        const int size =
            place < problem_.ranks() ? sizeWithin(jobs_[i], place, problem_.ranks(), height) : 0;
        if (size == 0) return false;
        place += size;
      }
      return true;
    };
    double high = low;
    while (!fit(high)) {
      low = high;
      high *= 1.3;
    }
    for (int i = 0; i < 12 && low < high; ++i) {
      const double middle = 0.5 * (low + high);
      (fit(middle) ? high : low) = middle;
    }
    return high;
  }

  // What a sequence of middle length takes on several numbers of ranks: few inside a node, and as
  // many as are left to each if some run side by side.
  std::vector<double> levels() const {
    double work = 0;
    size_t middle = 0;
    while (middle + 1 < jobs_.size() && 2 * work < work_) {
      work += jobs_[middle].min_size * jobs_[middle].min_size_s;
      ++middle;
    }
    const Job& job = jobs_[middle];
    std::vector<double> heights;
    const auto add = [&](int size) {
      if (size >= job.min_size) heights.push_back(cost_.seconds(job.load, size) * (1 + 1e-9));
    };
    const int node = std::min(cost_.cluster().ranks_per_node, problem_.ranks());
    for (int size = 1; size <= std::min(node, kMaxNode); ++size) add(size);
    for (int count = 1; problem_.ranks() / count > node; count += std::max(1, count / 2)) {
      add(problem_.ranks() / count);
    }
    return heights;
  }

  // Those of the last plan.
  const Heights& heights() const { return heights_; }
  // Seconds of a pipeline that runs the waves of the last plan at their full heights.
  double predicted() const { return predicted_; }

  // Empty if the shape is not possible, or if it takes more than `limit` seconds in any case, or if
  // a pipeline takes more than `most` for waves of such heights.
  std::vector<MicroBatch> plan(const Shape& shape, double limit, double most) {
    used_.assign(jobs_.size(), false);
    waves_.clear();
    full_ = shape.full;
    spread_ = shape.spread;
    reserved_ = 0;
    double work = work_;
    if (shape.top > 0) {
      work -= addTopWave(shape.top, shape.own);
      if (waves_.back().wide.empty()) return {};
      if (reserved_ == problem_.ranks()) reserved_ = 0;
    }
    if (!shape.given.others.empty()) {
      addGiven(shape.given);
    } else if (!addRelative(shape, work, limit)) {
      return {};
    }
    double added = 0;
    while (hasWide()) {
      addWave(extra_, reserved_, problem_.ranks());
      if (waves_.back().wide.empty()) return {};  // it fits only on the reserved ranks
      added += waves_.back().height;
      if (added > limit) return {};
      heights_.others.push_back(extra_);
    }
    return dealt(limit, std::min(most, limit * kHopeless));
  }

 private:
  // Adds the waves of a shape that do `work` together. False if that is not possible.
  bool addRelative(const Shape& shape, double work, double limit) {
    const std::vector<double> heights = relativeHeights(shape, ramps_);
    double sum = 0;
    for (size_t i = 0; i < heights.size(); ++i) {
      sum += heights[i] * (static_cast<int>(i) < shape.beside ? ranks_ : othersSpeed());
    }
    if (sum <= 0) return false;
    unit_ = work * (1 + shape.slack) / sum;
    const double all = std::accumulate(heights.begin(), heights.end(), 0.0);
    if (reserved_ > 0 && unit_ * all > limit * (1 + shape.slack)) return false;
    heights_ = {};
    for (size_t i = 0; i < heights.size(); ++i) {
      const double height = unit_ * heights[i];
      if (static_cast<int>(i) < shape.beside && reserved_ > 0) {
        heights_.reserved.push_back(height);
        addWave(height, 0, reserved_);
      }
      heights_.others.push_back(height);
      addWave(height, reserved_, problem_.ranks());
    }
    extra_ = unit_ * heights.front();
    return true;
  }

  // The highest ones first, which get the longest sequences.
  void addGiven(const Heights& given) {
    unit_ = extra_ = given.others.front();
    heights_ = given;
    auto reserved = given.reserved.begin();
    const auto end = reserved_ > 0 ? given.reserved.end() : reserved;
    for (const double height : given.others) {
      for (; reserved != end && *reserved >= height; ++reserved) addWave(*reserved, 0, reserved_);
      addWave(height, reserved_, problem_.ranks());
    }
    for (; reserved != end; ++reserved) addWave(*reserved, 0, reserved_);
  }

  // For heights that are numbers even where a pass takes no time.
  static double forwardShare(const CostModel& cost) {
    return std::clamp(cost.params().forward, 0.05, 0.95);
  }

  bool single(const Job& job, double height) const {
    return job.min_size == 1 && job.min_size_s <= height;
  }

  bool hasWide() const {
    for (size_t i = 0; i < jobs_.size() && !single(jobs_[i], unit_); ++i) {
      if (!used_[i]) return true;
    }
    return false;
  }

  // Sum of the speeds of the ranks that are not reserved.
  double othersSpeed() const {
    return std::accumulate(speeds_.begin() + reserved_, speeds_.end(), 0.0);
  }

  // A wave of the longest sequences; reserves its ranks for it. Returns the work that it takes, in
  // seconds of a rank on the smallest sizes.
  double addTopWave(double height, int most) {
    constexpr double kAboutAsLong = 0.6;
    unit_ = height;
    addWave(height, 0, problem_.ranks());
    Wave& wave = waves_.back();
    size_t kept = 0;
    while (kept < wave.wide.size() && static_cast<int>(kept) < most &&
           wave.wide[kept].seconds >= kAboutAsLong * wave.height) {
      reserved_ += wave.wide[kept++].size;
    }
    wave.wide.resize(kept);
    wave.last = wave.used = reserved_;
    wave.packs.clear();
    double work = 0;
    std::fill(used_.begin(), used_.end(), false);
    for (const Wave::Wide& wide : wave.wide) {
      used_[wide.job] = true;
      work += jobs_[wide.job].min_size * jobs_[wide.job].min_size_s;
    }
    return work;
  }

  // The longest sequences that are left and need several ranks to end within the height, or more
  // than that: those that end in time nowhere make the wave higher.
  void addWave(double height, int first, int last) {
    Wave wave;
    wave.first = first;
    wave.last = last;
    wave.used = first;
    wave.height = height;
    int misses = 0;
    for (size_t i = 0; i < jobs_.size() && wave.used < last; ++i) {
      if (used_[i]) continue;
      const Job& job = jobs_[i];
      if (single(job, height)) break;
      if (job.min_size > last - wave.used) continue;
      int size = sizeWithin(job, wave.used, last, wave.height);
      if (size == 0 && wave.used == first && tooHigh(job, first, last)) {
        size = fastestSize(job, first, last);
      }
      if (size == 0) {
        if (++misses > kMaxMisses) break;
        continue;
      }
      if (full_ > 0 && single(job, unit_) && cost_.seconds(job.load, size) < full_ * wave.height) {
        continue;
      }
      used_[i] = true;
      place(wave, i, size);
    }
    if (spread_ && wave.used < last) spread(wave);
    wave.packs.resize(last - wave.used);
    waves_.push_back(std::move(wave));
  }

  // On the next ranks.
  void place(Wave& wave, size_t job, int size) const {
    const int last = wave.used + size - 1;
    const double seconds = cost_.seconds(jobs_[job].load, size) / speeds_[last];
    wave.height = std::max(wave.height, seconds);
    wave.used += size;
    wave.wide.push_back({job, size, seconds});
  }

  // Makes a wave lower by the ranks that its long sequences leave over.
  void spread(Wave& wave) const {
    if (wave.wide.empty() || wave.wide.size() > kMaxSpread) return;
    double high = 0;
    for (const Wave::Wide& wide : wave.wide) high = std::max(high, wide.seconds);
    Wave best;
    const auto fit = [&](double height) {
      Wave found;
      found.used = wave.first;
      for (const Wave::Wide& wide : wave.wide) {
        if (found.used == wave.last) return false;
        const int size = sizeWithin(jobs_[wide.job], found.used, wave.last, height);
        if (size == 0) return false;
        place(found, wide.job, size);
      }
      best = std::move(found);
      return true;
    };
    double low = 0.5 * high;
    for (int i = 0; i < 10; ++i) {
      const double middle = 0.5 * (low + high);
      (fit(middle) ? high : low) = middle;
    }
    if (best.wide.empty()) return;
    wave.wide = std::move(best.wide);
    wave.used = best.used;
    wave.height = best.height;
  }

  // Fewest ranks from place `first` to `last`, fastest ranks first, on which the job ends within
  // the height; 0 if there are none.
  int sizeWithin(const Job& job, int first, int last, double height) const {
    const int left = last - first;
    if (cost_.cluster().speeds.empty()) return sizeWithin(job, left, height);
    int size = cost_.sizeWithin(job.load, job.min_size, left, height * speeds_[first]);
    while (size > 0 &&
           speeds_[first + size - 1] < speeds_[first]) {  // at the speed of the last one
      const int more = cost_.sizeWithin(job.load, size, left, height * speeds_[first + size - 1]);
      if (more == size) break;
      size = more;
    }
    return size;
  }

  // The same where all ranks are alike. Sequences of one length that follow each other get equal
  // sizes.
  int sizeWithin(const Job& job, int left, double height) const {
    if (job.load.tokens != last_size_.tokens || job.load.squares != last_size_.squares ||
        height != last_size_.height) {
      const int size = cost_.sizeWithin(job.load, job.min_size, problem_.ranks(), height);
      last_size_ = {job.load.tokens, job.load.squares, height, size};
    }
    return last_size_.size <= left ? last_size_.size : 0;
  }

  // The fastest number of the fastest ranks from place `first` to `last`.
  int fastestSize(const Job& job, int first, int last) const {
    const auto seconds = [&](int size) {
      return cost_.seconds(job.load, size) / speeds_[first + size - 1];
    };
    int best = std::min(cost_.fastestSize(job.load, job.min_size), last - first);
    const auto borders = cost_.cluster().largestGroups();
    for (const int border : {borders[1], borders[0]}) {
      if (best > border && job.min_size <= border && seconds(border) < seconds(best)) best = border;
    }
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

  // Whether a sequence ends within the unit on no number of these ranks.
  bool tooHigh(const Job& job, int first, int last) const {
    return sizeWithin(job, first, last, unit_) == 0;
  }

  // The micro-batches of the waves, in the order that drains and fills a pipeline fastest, once the
  // short sequences are dealt to the packs; none if they take longer than these limits.
  std::vector<MicroBatch> dealt(double limit, double most) {
    double work = 0;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (!used_[i]) work += jobs_[i].min_size_s;
    }
    std::vector<Lacking> lacking;
    if (work > 0) lacking = shareOut(work, limit);
    if (work > 0 && lacking.empty()) return {};
    for (Wave& wave : waves_) {
      wave.height = 0;
      for (const Wave::Wide& wide : wave.wide) wave.height = std::max(wave.height, wide.seconds);
    }
    for (const auto& [seconds, pack] : lacking) {
      Wave& wave = waves_[pack.first];
      wave.height = std::max(wave.height, seconds / speeds_[wave.used + pack.second]);
    }
    if (!order(most)) return {};
    const size_t waves = waves_.size();
    if (work > 0) fillPacks(std::move(lacking));
    if (waves_.size() > waves && !order(most)) return {};
    if (cost_.cluster().speeds.empty()) turnWaves();
    std::vector<MicroBatch> batches;
    for (const size_t wave : order_) take(waves_[wave], batches);
    return batches;
  }

  struct LastSize {
    double tokens = 0, squares = 0, height = 0;
    int size = 0;
  };
  using Lacking = std::pair<double, std::pair<int, int>>;  // (seconds, (wave, pack))

  // What each pack is to get of the short sequences; adds waves until there is room for them. Empty
  // if these take longer than `limit`.
  std::vector<Lacking> shareOut(double work, double limit) {
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
    const double height = std::min(unit_, full);
    for (double added = 0; room < work;) {
      added += height;
      if (added > limit) return {};
      addWave(height, reserved_, problem_.ranks());
      count(waves_.back());
    }
    const double scale = work / room;
    std::vector<Lacking> lacking;
    for (size_t w = 0; w < waves_.size(); ++w) {
      for (size_t k = 0; k < waves_[w].packs.size(); ++k) {
        lacking.push_back(
            {scale * packSeconds(waves_[w], k, full), {static_cast<int>(w), static_cast<int>(k)}});
      }
    }
    return lacking;
  }

  // Deals the short sequences to the packs, longest first, each to the pack that lacks most.
  void fillPacks(std::vector<Lacking> entries) {
    std::priority_queue<Lacking> lacking(std::less<Lacking>(), std::move(entries));
    std::vector<std::vector<double>> tokens;
    for (const Wave& wave : waves_) tokens.emplace_back(wave.packs.size(), 0.0);
    const double capacity = static_cast<double>(cost_.memory().capacity);
    std::vector<Lacking> passed;
    std::vector<int32_t> left_over;
    for (size_t i = 0; i < jobs_.size(); ++i) {
      if (used_[i]) continue;
      const Job& job = jobs_[i];
      passed.clear();
      bool placed = false;
      while (!placed && !lacking.empty() && passed.size() < kMaxProbes) {
        Lacking entry = lacking.top();
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
      for (const Lacking& entry : passed) {
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
      const size_t place = i % static_cast<size_t>(problem_.ranks() - reserved_);
      if (place == 0) {
        Wave wave;
        wave.first = wave.used = reserved_;
        wave.last = problem_.ranks();
        wave.packs.resize(problem_.ranks() - reserved_);
        waves_.push_back(std::move(wave));
      }
      Load load;
      for (const int32_t sequence : bins[i]) load += problem_.own(sequence);
      Wave& wave = waves_.back();
      wave.height = std::max(wave.height,
                             cost_.seconds(load, 1) / speeds_[reserved_ + static_cast<int>(place)]);
      wave.packs[place] = std::move(bins[i]);
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

  // Finds the order of the waves: those of the reserved ranks, then those of the others, which have
  // no micro-batch in common. False if a pipeline takes longer than `limit` for them.
  bool order(double limit) {
    std::vector<size_t> by_height(waves_.size());
    std::iota(by_height.begin(), by_height.end(), 0);
    std::stable_sort(by_height.begin(), by_height.end(),
                     [&](size_t a, size_t b) { return waves_[a].height > waves_[b].height; });
    order_.clear();
    predicted_ = 0;
    for (const bool reserved : {true, false}) {
      std::vector<size_t> waves;
      double seconds = 0;  // that the last stage works, at least
      for (const size_t wave : by_height) {
        if ((waves_[wave].first < reserved_) != reserved) continue;
        waves.push_back(wave);
        seconds += waves_[wave].height;
      }
      if (seconds > limit) return false;
      const std::deque<size_t> order = outwards(waves, seconds);
      if (seconds > limit) return false;
      predicted_ = std::max(predicted_, seconds);
      order_.insert(order_.end(), order.begin(), order.end());
    }
    return true;
  }

  // From the highest wave outwards: each goes to the end where it costs less. `seconds`: of a rank
  // of these heights.
  std::deque<size_t> outwards(const std::vector<size_t>& waves, double& seconds) const {
    Solo solo(cost_.cluster().pipeline, cost_.params().forward);
    std::deque<double> times;
    std::deque<size_t> order;
    for (const size_t wave : waves) {
      times.push_front(waves_[wave].height);
      const double front = solo.run(times);
      times.pop_front();
      times.push_back(waves_[wave].height);
      const double back = solo.run(times);
      seconds = std::min(front, back);
      if (back <= front) {
        order.push_back(wave);
      } else {
        times.pop_back();
        times.push_front(waves_[wave].height);
        order.push_front(wave);
      }
    }
    return order;
  }

  // The longest sequences of a wave lie on its first ranks, and these have more to do than the last
  // ones. Turns waves, so that all ranks have about as much to do.
  void turnWaves() {
    std::vector<double> busy(problem_.ranks(), 0.0);
    std::vector<double> times;
    for (Wave& wave : waves_) {
      times.clear();
      for (const Wave::Wide& wide : wave.wide) times.insert(times.end(), wide.size, wide.seconds);
      for (const auto& pack : wave.packs) {
        Load load;
        for (const int32_t sequence : pack) load += problem_.own(sequence);
        times.push_back(pack.empty() ? 0 : cost_.seconds(load, 1));
      }
      double difference = 0;
      const int last = static_cast<int>(times.size()) - 1;
      for (int i = 0; i <= last; ++i)
        difference += busy[wave.first + i] * (times[i] - times[last - i]);
      wave.turned = difference > 0;
      for (int i = 0; i <= last; ++i) busy[wave.first + i] += times[wave.turned ? last - i : i];
    }
  }

  void take(Wave& wave, std::vector<MicroBatch>& batches) const {
    const auto add = [&](int first, int size, std::vector<int32_t> sequences) {
      MicroBatch batch;
      if (wave.turned) first = wave.first + wave.last - first - size;
      batch.ranks = ringOrder(ranksFrom(first, size), cost_.cluster());
      batch.sequences = std::move(sequences);
      batch.start = static_cast<double>(batches.size());
      batches.push_back(std::move(batch));
    };
    int first = wave.first;
    for (const Wave::Wide& wide : wave.wide) {
      add(first, wide.size, problem_.withRiders(jobs_[wide.job].sequence));
      first += wide.size;
    }
    for (size_t k = 0; k < wave.packs.size(); ++k) {
      if (!wave.packs[k].empty()) {
        add(wave.used + static_cast<int>(k), 1, std::move(wave.packs[k]));
      }
    }
  }

  static constexpr int kMaxNode = 16;  // ranks of a node, for levels
  static constexpr int kMaxMisses = 64;
  static constexpr size_t kMaxSpread = 64;
  static constexpr double kHopeless = 1.05;  // of the limit, where waves as a whole take longer
  static constexpr size_t kMaxProbes = 8;

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Job> jobs_;  // by falling length
  const PipelineRamps ramps_;
  std::vector<int32_t> by_speed_;  // ranks, fastest first
  std::vector<double> speeds_;     // of these
  double ranks_ = 0;               // the sum of the speeds
  double work_ = 0;
  double unit_ = 0;
  double full_ = 0;
  bool spread_ = false;
  int reserved_ = 0;  // ranks, the first ones by place, for the longest sequences
  std::vector<bool> used_;
  std::vector<Wave> waves_;
  mutable LastSize last_size_;  // of sizeWithin()
  Heights heights_;             // of the waves
  double extra_ = 0;            // of those that are added where these do not suffice
  std::vector<size_t> order_;   // of the waves
  double predicted_ = 0;        // seconds of a pipeline with these heights
};

}  // namespace hdpcomm::planner
