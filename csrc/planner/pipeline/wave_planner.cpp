#include "planner/pipeline/wave_planner.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/rings.hpp"
#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kLast = 0.45;  // height of the last wave of a slope over that of the highest ones

std::vector<double> relativeHeights(const Shape& shape, const PipelineRamps& ramps) {
  std::vector<double> heights;
  if (shape.ramps > 0) {
    heights = ramps.heights(shape.waves, shape.later);
    for (double& height : heights) height = std::pow(height, shape.ramps);
    std::sort(heights.begin(), heights.end(), std::greater<>());
    return heights;
  }
  for (int i = 1; i <= shape.up; ++i) heights.push_back(std::pow(shape.growth, -i));
  for (int i = 1; i <= shape.down; ++i) {
    heights.push_back(1 - (1 - kLast) * i / shape.down);
  }
  while (static_cast<int>(heights.size()) < shape.waves) heights.push_back(1);
  std::sort(heights.begin(), heights.end(), std::greater<>());
  return heights;
}

}  // namespace

WavePlanner::WavePlanner(const Problem& problem)
    : problem_(problem),
      cost_(problem.cost()),
      by_speed_(cost_, problem.ranks()),
      jobs_(makeJobs(problem)),
      ramps_(cost_, StagesInPasses(cost_.cluster()), forwardShare(cost_), forwardShare(cost_), 0),
      order_(cost_) {
  for (const Job& job : jobs_) work_ += job.min_size * job.min_size_s;
  other_.resize(jobs_.size());
  for (size_t i = jobs_.size(); i-- > 0;) {
    const bool last = i + 1 == jobs_.size() || jobs_[i + 1].load != jobs_[i].load ||
                      jobs_[i + 1].min_size != jobs_[i].min_size;
    other_[i] = last ? i + 1 : other_[i + 1];
  }
}

std::vector<double> WavePlanner::levels() const {
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

double WavePlanner::spent() const {
  const auto waves = static_cast<double>(waves_.size());
  const double beside = std::min(waves, static_cast<double>(WaveOrder::kNear));
  return kOfSequence * problem_.count() +
         2 * waves * cost_.cluster().pipeline * (problem_.ranks() + 6 * beside);
}

bool WavePlanner::arrange(const Shape& shape, double limit, double most) {
  markUnused();
  waves_.clear();
  full_ = shape.full;
  spread_ = shape.spread;
  nodes_ = shape.nodes && by_speed_.alike();
  reserved_ = 0;
  double work = work_;
  if (shape.top > 0) {
    work -= addTopWave(shape.top, shape.own);
    if (waves_.back().wide.empty()) return false;
    if (reserved_ == problem_.ranks()) reserved_ = 0;
  }
  return addAll(shape, work, limit) && makeOrder(limit, std::min(most, limit * kHopeless));
}

bool WavePlanner::addAll(const Shape& shape, double work, double limit) {
  if (!shape.given.others.empty()) {
    addGiven(shape.given);
  } else if (!addRelative(shape, work, limit)) {
    return false;
  }
  double added = 0;
  while (hasWide()) {
    addWave(extra_, reserved_, problem_.ranks());
    if (waves_.back().wide.empty()) return false;  // it fits only on the reserved ranks
    added += waves_.back().height;
    if (added > limit) return false;
    heights_.others.push_back(extra_);
  }
  return true;
}

bool WavePlanner::addRelative(const Shape& shape, double work, double limit) {
  const std::vector<double> heights = relativeHeights(shape, ramps_);
  const double all_speeds = by_speed_.speedFrom(0), other_speeds = by_speed_.speedFrom(reserved_);
  double sum = 0;
  for (size_t i = 0; i < heights.size(); ++i) {
    sum += heights[i] * (static_cast<int>(i) < shape.beside ? all_speeds : other_speeds);
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

void WavePlanner::addGiven(const Heights& given) {
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

double WavePlanner::forwardShare(const CostModel& cost) {
  return std::clamp(cost.params().forward, 0.05, 0.95);
}

bool WavePlanner::single(const Job& job, double height) const {
  return job.min_size == 1 && job.min_size_s <= height;
}

bool WavePlanner::hasWide() {
  while (first_single_ < jobs_.size() && !single(jobs_[first_single_], unit_)) ++first_single_;
  return unusedFrom(0) < first_single_;
}

void WavePlanner::markUnused() {
  used_.assign(jobs_.size(), false);
  after_.resize(jobs_.size() + 1);
  std::iota(after_.begin(), after_.end(), 0);
  first_single_ = 0;
}

void WavePlanner::markUsed(size_t job) {
  used_[job] = true;
  after_[job] = job + 1;
}

size_t WavePlanner::unusedFrom(size_t job) {
  size_t found = job;
  while (after_[found] != found) found = after_[found];
  while (after_[job] != found) job = std::exchange(after_[job], found);
  return found;
}

double WavePlanner::addTopWave(double height, int most) {
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
  markUnused();
  for (const Wave::Wide& wide : wave.wide) {
    if (wide.job == Wave::kIdle) continue;
    markUsed(wide.job);
    work += jobs_[wide.job].min_size * jobs_[wide.job].min_size_s;
  }
  return work;
}

void WavePlanner::addWave(double height, int first, int last) {
  Wave wave;
  wave.first = first;
  wave.last = last;
  wave.used = first;
  wave.height = height;
  int misses = 0;
  size_t next = unusedFrom(0);
  while (next < jobs_.size() && wave.used < last) {
    const size_t i = next;
    const Job& job = jobs_[i];
    if (single(job, height)) break;
    if (job.min_size > last - wave.used) {
      next = unusedFrom(other_[i]);
      continue;
    }
    next = unusedFrom(i + 1);
    int size = by_speed_.sizeWithin(job, wave.used, last, wave.height);
    if (size == 0 && wave.used == first && tooHigh(job, first, last)) {
      size = by_speed_.fastestSize(job, first, last);
    }
    if (size == 0) {
      if (++misses > kMaxMisses) break;
      continue;
    }
    if (full_ > 0 && single(job, unit_) && cost_.seconds(job.load, size) < full_ * wave.height) {
      next = unusedFrom(other_[i]);
      continue;
    }
    if (nodes_ && !endNode(wave, i, size)) {
      if (wave.used + size > last) break;
      next = unusedFrom(i);  // the end of the node is filled, before this job
      continue;
    }
    markUsed(i);
    place(wave, i, size);
  }
  if (spread_ && !nodes_ && wave.used < last) spread(wave);
  wave.packs.resize(last - wave.used);
  waves_.push_back(std::move(wave));
}

bool WavePlanner::endNode(Wave& wave, size_t job, int size) {
  const int node = cost_.cluster().ranks_per_node;
  const int left = node - wave.used % node;
  if (size <= left || left == node || size > node) return true;
  const auto within = [&](const Job& other) {
    const int least = by_speed_.sizeWithin(other, wave.used, wave.used + left, wave.height);
    return least > 0;
  };
  const auto first =
      std::partition_point(jobs_.begin() + static_cast<std::ptrdiff_t>(job) + 1, jobs_.end(),
                           [&](const Job& other) { return !within(other); });
  const size_t other = unusedFrom(static_cast<size_t>(first - jobs_.begin()));
  if (other < jobs_.size() && within(jobs_[other])) {
    markUsed(other);
    place(wave, other,
          by_speed_.sizeWithin(jobs_[other], wave.used, wave.used + left, wave.height));
  } else {
    wave.wide.push_back({Wave::kIdle, left, 0});
    wave.used += left;
  }
  return false;
}

void WavePlanner::place(Wave& wave, size_t job, int size) const {
  const int last = wave.used + size - 1;
  const double seconds = cost_.seconds(jobs_[job].load, size) / by_speed_.speed(last);
  wave.height = std::max(wave.height, seconds);
  wave.used += size;
  wave.wide.push_back({job, size, seconds});
}

void WavePlanner::spread(Wave& wave) const {
  if (wave.wide.empty() || wave.wide.size() > kMaxSpread) return;
  double high = 0;
  for (const Wave::Wide& wide : wave.wide) high = std::max(high, wide.seconds);
  Wave best;
  const auto fit = [&](double height) {
    Wave found;
    found.used = wave.first;
    for (const Wave::Wide& wide : wave.wide) {
      if (found.used == wave.last) return false;
      const int size = by_speed_.sizeWithin(jobs_[wide.job], found.used, wave.last, height);
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

bool WavePlanner::tooHigh(const Job& job, int first, int last) const {
  return by_speed_.sizeWithin(job, first, last, unit_) == 0;
}

bool WavePlanner::makeOrder(double limit, double most) {
  packs_.emplace(problem_, by_speed_, jobs_, used_);
  if (packs_->takeNoTime()) return false;  // heights say nothing of their packs
  lacking_.clear();
  if (packs_->work() > 0) {
    const double room = makeRoom(limit);
    if (room < packs_->work()) return false;
    lacking_ = packs_->shares(waves_, room);
  }
  for (Wave& wave : waves_) {
    wave.height = 0;
    for (const Wave::Wide& wide : wave.wide) wave.height = std::max(wave.height, wide.seconds);
  }
  for (const auto& [seconds, pack] : lacking_) {
    Wave& wave = waves_[pack.first];
    const int place = wave.placeOf(static_cast<size_t>(pack.second));
    wave.height = std::max(wave.height, seconds / by_speed_.speed(place));
  }
  most_ = most;
  if (!order_.find(waves_, reserved_, most)) return false;
  arrangement_ = numberOfWaves();
  return true;
}

uint64_t WavePlanner::numberOfWaves() const {
  uint64_t number = reserved_;
  const auto add = [&number](uint64_t value) {
    number = (std::rotl(number, 23) ^ value) * 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
  };
  for (const Wave& wave : waves_) {
    add(wave.first);
    add(wave.last);
    add(wave.used);
    for (const Wave::Wide& wide : wave.wide) {
      add(wide.job);
      add(wide.size);
    }
  }
  for (const size_t wave : order_.waves()) add(wave);
  int32_t last = -1;
  for (const auto& [seconds, pack] : lacking_) {  // of equal ones, which follow each other, one
    if (pack.first == std::exchange(last, pack.first) && by_speed_.alike()) continue;
    add(std::bit_cast<uint64_t>(seconds));
    add(pack.first);
  }
  return number;
}

bool WavePlanner::deal() {
  const size_t waves = waves_.size();
  if (packs_->work() > 0) packs_->fill(waves_, lacking_, reserved_);
  if (waves_.size() > waves && !order_.find(waves_, reserved_, most_)) return false;
  return true;
}

double WavePlanner::makeRoom(double limit) {
  const WavePacks& packs = *packs_;
  double room = 0;
  for (const Wave& wave : waves_) packs.addRoom(wave, room);
  const double height = std::min(unit_, packs.full());
  for (double added = 0; room < packs.work();) {
    added += height;
    if (added > limit) break;
    addWave(height, reserved_, problem_.ranks());
    packs.addRoom(waves_.back(), room);
  }
  return room;
}

std::vector<MicroBatch> WavePlanner::plan() const {
  std::vector<size_t> first_of;  // by wave: the number of its first pack
  size_t packs = 0, wide = 0;
  for (const Wave& wave : waves_) {
    first_of.push_back(packs);
    packs += wave.packs.size();
    wide += wave.wide.size();
  }
  std::vector<std::vector<int32_t>> sequences = packs_->sequences(packs);
  std::vector<MicroBatch> batches;
  batches.reserve(wide + packs);
  for (const size_t wave : order_.waves()) {
    take(waves_[wave], sequences.data() + first_of[wave], batches);
  }
  return batches;
}

const LevelPasses& WavePlanner::passes() {
  passes_.clear();
  for (const size_t wave : order_.waves()) addPasses(waves_[wave]);
  return passes_;
}

void WavePlanner::take(const Wave& wave, std::vector<int32_t>* packs,
                       std::vector<MicroBatch>& batches) const {
  const auto add = [&](int first, int size, std::vector<int32_t> sequences) {
    MicroBatch batch;
    batch.ranks = by_speed_.ranks(first, size);
    if (size > 1) batch.ranks = ringOrder(std::move(batch.ranks), cost_.cluster());
    batch.sequences = std::move(sequences);
    batch.start = static_cast<double>(batches.size());
    batches.push_back(std::move(batch));
  };
  int first = wave.first;
  for (const Wave::Wide& wide : wave.wide) {
    if (wide.job != Wave::kIdle) {
      add(first, wide.size, problem_.withRiders(jobs_[wide.job].sequence));
    }
    first += wide.size;
  }
  for (size_t k = 0; k < wave.packs.size(); ++k) {
    if (!packs[k].empty()) add(wave.placeOf(k), 1, std::move(packs[k]));
  }
}

void WavePlanner::addPasses(const Wave& wave) {
  std::vector<int32_t>& ranks = passes_.ranks;
  MicroBatch batch;
  int first = wave.first;
  for (const Wave::Wide& wide : wave.wide) {
    if (wide.job != Wave::kIdle) {
      batch.ranks = by_speed_.ranks(first, wide.size);
      if (cost_.cluster().sharesInterfaces()) {  // else the order of a ring does not matter
        batch.ranks = ringOrder(std::move(batch.ranks), cost_.cluster());
      }
      batch.sequences = problem_.withRiders(jobs_[wide.job].sequence);
      const Work work = workOf(problem_, batch);
      batch.offload = cost_.offloadFor(static_cast<double>(work.held));
      ranks.insert(ranks.end(), batch.ranks.begin(), batch.ranks.end());
      for (int kind = 0; kind < cost_.kinds(); ++kind) {
        passes_.add(passCosts(problem_, batch, work, kind));
      }
      passes_.add();
    }
    first += wide.size;
  }
  for (size_t k = 0; k < wave.packs.size(); ++k) {
    if (wave.packs[k].tokens == 0) continue;
    const int place = wave.placeOf(k);
    ranks.push_back(by_speed_.rank(place));
    for (int kind = 0; kind < cost_.kinds(); ++kind) {
      passes_.add(passCostsOfOne(cost_.ofKind(kind), wave.packs[k], by_speed_.speed(place)));
    }
    passes_.add();
  }
}

}  // namespace hdpcomm::planner
