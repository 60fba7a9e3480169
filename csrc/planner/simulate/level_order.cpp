#include "planner/simulate/level_order.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {
namespace {

class LevelOrder {
 public:
  // `plan`: where it has slices, else it may be empty. `gaps`: see simulateLevels().
  LevelOrder(const Problem& problem, const LevelPasses& passes, const Plan& plan, bool gaps)
      : problem_(problem),
        passes_(passes),
        plan_(plan),
        gaps_(gaps),
        stages_(problem.cost().cluster().pipeline),
        ranks_(problem.ranks()) {
    for (const LevelPasses::Batch& each : passes_.batches) offloads_ = offloads_ || each.copy > 0;
    findLevels();
    const size_t devices = static_cast<size_t>(ranks_) * stages_;
    free_.assign(devices, 0.0);
    if (offloads_) {
      to_host_.assign(devices, 0.0);
      from_host_.assign(devices, 0.0);
    }
  }

  // `costs`: of the micro-batches.
  void record(SimulatedStep& step, const std::vector<PassCosts>& costs) {
    record_ = &step;
    costs_ = costs;
    record_->begin(ranks_);
    resident_.assign(free_.size(), 0.0);
    run();
    record_->finish(makespan_);
  }

  // Given up where the step is certain not to end before `limit`.
  double makespan(double limit) {
    if (limit < kNever) {
      limit_ = limit;
      left_ = rankTimes();
      least_ = leastMakespan(problem_, left_);
    }
    if (least_ < limit) run();
    return std::max(makespan_, least_ < limit ? 0 : least_);
  }

 private:
  // What runs in turn, level by level: passes read it from front to back.
  struct Batch {
    LevelPasses::Batch passes = {};
    int32_t index = 0;
    double given = 0;  // when its last pass ends
  };

  std::vector<RankTime> rankTimes() const {
    std::vector<RankTime> times(ranks_);
    for (const LevelPasses::Batch& batch : passes_.batches) {
      for (const int32_t rank : ranksOf(batch)) {
        times[rank].add(problem_.cost().cluster(), batch.forward, batch.backward);
      }
    }
    return times;
  }

  void run() {
    const int levels = static_cast<int>(backward_levels_.size()) - 1;
    // With passes of one second each, device s runs the forward pass of level l in second 2 l + s,
    // and its backward pass in second 2 (l + p) - 1 - s.
    for (int second = 0; second < 2 * (levels + stages_) - 1; ++second) {
      for (int stage = 0; stage < stages_; ++stage) {
        const bool backward = (second - stage) % 2 != 0;
        const int level = (backward ? second + 1 + stage - 2 * stages_ : second - stage) / 2;
        const bool before = backward ? second + 1 + stage < 2 * stages_ : second < stage;
        const std::vector<int32_t>& bounds = backward ? backward_levels_ : levels_;
        if (before || level >= static_cast<int>(bounds.size()) - 1) continue;
        if (backward && !backward_order_.empty()) {
          for (int32_t i = bounds[level]; i < bounds[level + 1]; ++i) {
            pass(batches_[backward_order_[i]], stage, backward);
          }
        } else {
          for (int32_t i = bounds[level]; i < bounds[level + 1]; ++i) {
            pass(batches_[i], stage, backward);
          }
        }
        if (least_ >= limit_) return;
      }
    }
  }

  void findLevels() {
    const size_t count = passes_.batches.size();
    std::vector<int32_t> next(ranks_, 0);
    std::vector<int32_t> level_of(count, 0);
    std::vector<int32_t> first(gaps_ ? ranks_ : 0, 0);  // level of the first slice
    for (size_t i = 0; i < count; ++i) {
      const std::span<const int32_t> ranks = ranksOf(passes_.batches[i]);
      int32_t level = 0;
      for (const int32_t rank : ranks) level = std::max(level, next[rank]);
      int32_t following = level + 1;
      if (gaps_ && plan_.micro_batches[i].slice.some()) {
        const Slice& slice = plan_.micro_batches[i].slice;
        for (const int32_t rank : ranks) {
          if (slice.first == 0) first[rank] = level;
        }
        if (!slice.more) following += level - first[ranks.front()];
      }
      for (const int32_t rank : ranks) next[rank] = following;
      if (static_cast<size_t>(level) + 2 > levels_.size()) levels_.resize(level + 2, 0);
      ++levels_[level + 1];
      level_of[i] = level;
    }
    std::partial_sum(levels_.begin(), levels_.end(), levels_.begin());
    std::vector<int32_t> places(levels_.begin(), levels_.end());
    batches_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      batches_[places[level_of[i]]++] = {passes_.batches[i], static_cast<int32_t>(i)};
    }
    findBackwardLevels(level_of);
  }

  // Number k of n slices, whose levels begin with l, runs its backward pass as a micro-batch of
  // level l + 2 (n - 1) - k would: the last one first, as soon as its forward pass has ended. All
  // others have the level of their forward passes.
  void findBackwardLevels(const std::vector<int32_t>& level_of) {
    backward_levels_ = levels_;
    const auto& batches = plan_.micro_batches;
    const auto count = static_cast<int32_t>(batches.size());
    if (std::none_of(batches.begin(), batches.end(),
                     [](const MicroBatch& batch) { return batch.slice.some(); })) {
      return;
    }
    std::vector<int32_t> level(level_of);
    const std::vector<int32_t> following = followingSlices(plan_);
    for (int32_t i = 0; i < count; ++i) {
      if (!batches[i].slice.some() || batches[i].slice.first > 0) continue;
      int slices = 1;
      for (int32_t k = following[i]; k >= 0; k = following[k]) ++slices;
      int32_t k = i;
      for (int number = 0; k >= 0; k = following[k], ++number) {
        level[k] = level_of[i] + 2 * (slices - 1) - number;
      }
    }
    const int32_t most = *std::max_element(level.begin(), level.end());
    backward_levels_.assign(most + 2, 0);
    for (const int32_t each : level) ++backward_levels_[each + 1];
    std::partial_sum(backward_levels_.begin(), backward_levels_.end(), backward_levels_.begin());
    std::vector<int32_t> next(backward_levels_.begin(), backward_levels_.end());
    backward_order_.resize(count);
    for (int32_t place = 0; place < count; ++place) {
      backward_order_[next[level[batches_[place].index]]++] = place;
    }
  }

  size_t device(int32_t rank, int stage) const {
    return static_cast<size_t>(stage) * ranks_ + rank;
  }

  std::span<const int32_t> ranksOf(const LevelPasses::Batch& batch) const {
    return {passes_.ranks.data() + batch.first_rank, static_cast<size_t>(batch.num_ranks)};
  }

  void pass(Batch& batch, int stage, bool backward) {
    const LevelPasses::Batch& passes = batch.passes;
    const std::span<const int32_t> ranks = ranksOf(passes);
    const double seconds = backward ? passes.backward : passes.forward;
    double* const free = free_.data() + device(0, stage);
    double start = batch.given;
    for (const int32_t rank : ranks) start = std::max(start, free[rank]);
    double end = start + seconds;
    double stall = 0;
    if (offloads_ && passes.copy > 0) {
      double* const stream = (backward ? from_host_ : to_host_).data() + device(0, stage);
      double copied = 0;
      for (const int32_t rank : ranks) {
        stream[rank] = std::max(stream[rank], start) + passes.copy;
        copied = std::max(copied, stream[rank]);
      }
      stall = std::max(0.0, copied - end);
      end += stall;
    }
    for (const int32_t rank : ranks) free[rank] = end;
    batch.given = end;
    makespan_ = std::max(makespan_, end);
    if (limit_ < kNever) {
      // All later passes of the micro-batch wait for this one.
      const double way =
          backward ? stage * seconds : (stages_ - 1 - stage) * seconds + stages_ * passes.backward;
      least_ = std::max(least_, (end + way) * (1 - kRounding));
    }
    if (limit_ < kNever && stage + 1 == stages_) {
      for (const int32_t rank : ranks) least_ = std::max(least_, leastEnd(rank, end, seconds));
    }
    if (record_ != nullptr) recordPass(batch, stage, backward, {start, end, stall});
  }

  // When a rank ends at least, once its last device has run a pass.
  double leastEnd(int32_t rank, double end, double seconds) {
    RankTime& left = left_[rank];
    left.busy -= seconds;
    return (end + left.busy + (stages_ - 1) * left.backward) * (1 - kRounding);
  }

  struct Times {
    double start, end, stall;
  };

  void recordPass(const Batch& batch, int stage, bool backward, const Times& times) {
    const PassCosts& cost = costs_[batch.index];
    const PassCosts::Pass& part = backward ? cost.backward : cost.forward;
    for (const int32_t rank : ranksOf(batch.passes)) {
      double& resident = resident_[device(rank, stage)];
      resident += backward ? -cost.resident : cost.resident;
      record_->peak_tokens[rank] = std::max(record_->peak_tokens[rank], resident);
      record_->busy[rank] += part.seconds - part.exposed;
      record_->exposed[rank] += part.exposed;
      record_->stalled[rank] += times.stall;
      if (backward) record_->end[rank] = std::max(record_->end[rank], times.end);
    }
    record_->spans.push_back({batch.index, stage, backward, times.start, times.end});
  }

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kRounding = 1e-9;  // of sums

  const Problem& problem_;
  const LevelPasses& passes_;
  const Plan& plan_;
  const bool gaps_;
  const int stages_;
  const int ranks_;
  std::span<const PassCosts> costs_;  // where the step is recorded
  bool offloads_ = false;
  std::vector<int32_t> levels_;  // the first of `batches_` of each, and their number
  std::vector<Batch> batches_;   // by level, those of one as in the plan
  // The same for backward passes; the order is empty where it is that of `batches_`.
  std::vector<int32_t> backward_levels_, backward_order_;
  std::vector<double> free_;                 // by device: when its last pass ends
  std::vector<double> to_host_, from_host_;  // by device: when its copy stream is free
  std::vector<double> resident_;             // by device: tokens
  std::vector<RankTime> left_;               // by rank: what its last device has to run yet
  double limit_ = kNever;
  double least_ = 0;  // seconds, known before the end
  double makespan_ = 0;
  SimulatedStep* record_ = nullptr;
};

std::vector<PassCosts> costsOf(const Problem& problem, const Plan& plan) {
  std::vector<PassCosts> costs;
  costs.reserve(plan.micro_batches.size());
  for (const MicroBatch& batch : plan.micro_batches) {
    costs.push_back(passCosts(problem, batch));
  }
  return costs;
}

LevelPasses passesOf(const Plan& plan, const std::vector<PassCosts>& costs) {
  LevelPasses passes;
  passes.batches.reserve(costs.size());
  passes.ranks.reserve(costs.size());
  for (size_t i = 0; i < costs.size(); ++i) {
    const std::vector<int32_t>& ranks = plan.micro_batches[i].ranks;
    passes.ranks.insert(passes.ranks.end(), ranks.begin(), ranks.end());
    passes.add(costs[i]);
  }
  return passes;
}

}  // namespace

void LevelPasses::add(const PassCosts& costs) {
  const int32_t first = batches.empty() ? 0 : batches.back().first_rank + batches.back().num_ranks;
  batches.push_back({first, static_cast<int32_t>(ranks.size()) - first, costs.forward.seconds,
                     costs.backward.seconds, costs.copy});
}

SimulatedStep simulateLevels(const Problem& problem, const Plan& plan, bool gaps) {
  SimulatedStep step;
  const std::vector<PassCosts> costs = costsOf(problem, plan);
  LevelOrder(problem, passesOf(plan, costs), plan, gaps).record(step, costs);
  return step;
}

double makespanByLevels(const Problem& problem, const Plan& plan) {
  return makespanByLevels(problem, plan, costsOf(problem, plan),
                          std::numeric_limits<double>::infinity());
}

double makespanByLevels(const Problem& problem, const Plan& plan,
                        const std::vector<PassCosts>& costs, double limit, bool gaps) {
  return LevelOrder(problem, passesOf(plan, costs), plan, gaps).makespan(limit);
}

double makespanByLevels(const Problem& problem, const LevelPasses& passes, double limit) {
  return LevelOrder(problem, passes, Plan{}, false).makespan(limit);
}

}  // namespace hdpcomm::planner
