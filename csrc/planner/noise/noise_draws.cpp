#include "planner/noise/noise_draws.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/model/cost_model.hpp"
#include "planner/model/rings.hpp"

namespace hdpcomm::planner {

NoiseDraws::NoiseDraws(size_t sequences, int steps, double noise)
    : steps_(steps),
      noise_(noise),
      chain_((steps / 2 + kChains - 1) / kChains),
      leap_(static_cast<uint64_t>(chain_) * kTerms),
      drawn_(sequences, nullptr),
      random_(sequences) {
  const Xorshift::Leap leap(static_cast<uint64_t>(steps / 2) * kTerms);
  Xorshift random;
  for (Xorshift& own : random_) {
    own = random;
    random.leap(leap);
  }
}

const float* NoiseDraws::of(int32_t sequence) const {
  const float*& known = drawn_[sequence];
  if (known == nullptr) known = draw(sequence);
  return known;
}

const float* NoiseDraws::draw(int32_t sequence) const {
  constexpr size_t kOfPart = 1 << 12;  // sequences
  const size_t steps = steps_;
  if (left_ == 0) {
    factors_.push_back(std::make_unique<float[]>(kOfPart * steps));
    left_ = kOfPart;
  }
  float* const factors = factors_.back().get() + (kOfPart - left_--) * steps;
  const size_t half = steps / 2;
  // One number needs the one before, so chains of them are drawn side by side.
  Xorshift random[kChains];
  random[0] = random_[sequence];
  for (int each = 1; each < kChains; ++each) {
    random[each] = random[each - 1];
    random[each].leap(leap_);
  }
  std::vector<double>& normal = normal_;
  normal.resize(static_cast<size_t>(chain_) * kChains);
  for (int k = 0; k < chain_; ++k) {
    double values[kChains];
    // A sum of uniform numbers: nearly normal, and the same on any machine.
    for (double& value : values) value = -6;
    for (int term = 0; term < kTerms; ++term) {
      for (int each = 0; each < kChains; ++each) values[each] += random[each].unit();
    }
    for (int each = 0; each < kChains; ++each) normal[each * chain_ + k] = values[each];
  }
  double squares = 0;
  for (size_t k = 0; k < half; ++k) squares += normal[k] * normal[k];
  const double scale = noise_ / std::sqrt(squares / static_cast<double>(half));
  for (size_t k = 0; k < half; ++k) {
    factors[k] = static_cast<float>(std::max(0.0, 1 + scale * normal[k]));
    factors[half + k] = static_cast<float>(std::max(0.0, 1 - scale * normal[k]));
  }
  return factors;
}

double DrawnEnds::ofRank(int rank, int step) const noexcept {
  return row_[rank] < 0 ? 0.0 : ends_[static_cast<size_t>(row_[rank]) * steps_ + step];
}

Certainty certaintyOf(const Problem& problem, const MicroBatch& batch) {
  const CostModel& cost = problem.cost();
  const CostParams& params = cost.params();
  const int size = static_cast<int>(batch.ranks.size());
  const Load load = workOf(problem, batch).load;
  const double compute =
      cost.computeSeconds(load, size) + params.fixed + (size - 1) * params.ring_step;
  const double all = cost.seconds(load, size, scopeOf(batch.ranks, cost.cluster()),
                                  crowding(batch.ranks, cost.cluster()));
  const double speed = slowest(batch.ranks, cost.cluster());
  return {compute / speed, std::max(0.0, all - compute) / speed};
}

DrawnEnds::DrawnEnds(const Problem& problem, size_t batches, const NoiseDraws& draws)
    : problem_(problem),
      draws_(draws),
      steps_(draws.steps()),
      makespans_(steps_, 0.0F),
      row_(problem.ranks(), -1) {
  const size_t rows = std::min(batches, row_.size());
  ends_ = std::make_unique_for_overwrite<float[]>(rows * static_cast<size_t>(steps_));
  unused_.resize(rows);
  std::iota(unused_.rbegin(), unused_.rend(), 0);
  ranks_of_.assign(rows, 0);
}

DrawnEnds::DrawnEnds(const Problem& problem, const std::vector<MicroBatch>& batches,
                     const NoiseDraws& draws, double limit)
    : DrawnEnds(problem, batches.size(), draws) {
  constexpr size_t kUnlooked = 1024;  // micro-batches, after which it looks at the mean
  for (size_t i = 0; i < batches.size(); ++i) {
    if (i % kUnlooked == 0 && meanMakespan() >= limit) return;
    add(batches[i]);
  }
}

void DrawnEnds::add(const MicroBatch& batch) {
  const size_t steps = steps_;
  before_.clear();
  for (const int32_t rank : batch.ranks) {
    if (row_[rank] >= 0) before_.push_back(row_[rank]);
  }
  int64_t row = -1;
  if (before_.size() > 1) std::sort(before_.begin(), before_.end());
  for (const int64_t other : before_) {
    if (--ranks_of_[other] > 0) continue;
    if (row >= 0) unused_.push_back(row);
    row = other;
  }
  if (row < 0) {
    row = unused_.back();
    unused_.pop_back();
    std::fill_n(ends_.get() + row * steps, steps, 0.0F);
  }
  float* const end = ends_.get() + row * steps;
  before_.erase(std::unique(before_.begin(), before_.end()), before_.end());
  for (const int64_t other : before_) {
    if (other == row) continue;
    const float* const ready = ends_.get() + other * steps;
    for (size_t k = 0; k < steps; ++k) end[k] = std::max(end[k], ready[k]);
  }
  for (const int32_t rank : batch.ranks) row_[rank] = row;
  ranks_of_[row] = static_cast<int32_t>(batch.ranks.size());
  const Certainty parts = certaintyOf(problem_, batch);
  const auto compute = static_cast<float>(parts.compute);
  const auto wait = static_cast<float>(parts.wait);
  const float* const factors = draws_.of(batch.sequences.front());
  float* const makespans = makespans_.data();
  for (size_t k = 0; k < steps; ++k) {
    end[k] += wait + compute * factors[k];
    makespans[k] = std::max(makespans[k], end[k]);
  }
}

double DrawnEnds::meanMakespan() const noexcept {
  double sum = 0;
  for (const float makespan : makespans_) sum += makespan;
  return sum / static_cast<double>(steps_);
}

int drawsFor(size_t count, size_t times, int fewest, int most) noexcept {
  const size_t draws = times / std::max<size_t>(count, 1) / 2 * 2;
  return static_cast<int>(std::clamp<size_t>(draws, fewest, most));
}

std::vector<bool> sharedOnes(const Problem& problem, const Plan& plan) {
  std::vector<bool> shared(plan.micro_batches.size(), false);
  std::vector<bool> alone(problem.ranks(), true);
  for (size_t i = shared.size(); i-- > 0;) {
    const MicroBatch& batch = plan.micro_batches[i];
    if (batch.ranks.size() == 1 && batch.offload == 0 && alone[batch.ranks.front()]) continue;
    shared[i] = true;
    for (const int32_t member : batch.ranks) alone[member] = false;
  }
  return shared;
}

Tails takeTails(const Problem& problem, const Plan& plan) {
  Tails tails;
  const std::vector<bool> shared = sharedOnes(problem, plan);
  tails.shared.reserve(std::count(shared.begin(), shared.end(), true));
  for (size_t i = 0; i < shared.size(); ++i) {
    if (shared[i]) tails.shared.push_back(plan.micro_batches[i]);
  }
  for (size_t i = shared.size(); i-- > 0;) {  // the last ones of ranks first
    if (shared[i]) continue;
    const std::vector<int32_t>& own = plan.micro_batches[i].sequences;
    tails.sequences.insert(tails.sequences.end(), own.begin(), own.end());
  }
  sortByTime(problem, tails.sequences);
  return tails;
}

void sortByTime(const Problem& problem, std::vector<int32_t>& sequences) {
  constexpr size_t kFew = 4096;
  if (sequences.size() > kFew) {  // longer ones mostly take longer, and lengths are sorted faster
    std::vector<bool> there(problem.count(), false);
    for (const int32_t each : sequences) there[each] = true;
    sequences = problem.byLength();
    std::erase_if(sequences, [&](int32_t each) { return !there[each]; });
  }
  std::vector<std::pair<double, int32_t>> by_time;  // negated
  by_time.reserve(sequences.size());
  for (const int32_t each : sequences) {
    by_time.emplace_back(-problem.cost().seconds(problem.own(each), 1), each);
  }
  if (std::is_sorted(by_time.begin(), by_time.end())) return;
  std::sort(by_time.begin(), by_time.end());
  for (size_t i = 0; i < by_time.size(); ++i) sequences[i] = by_time[i].second;
}

}  // namespace hdpcomm::planner
