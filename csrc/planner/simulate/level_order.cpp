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
  LevelOrder(const Problem& problem, const Plan& plan, std::vector<PassCosts> costs,
             bool gaps = false)
      : problem_(problem),
        plan_(plan),
        gaps_(gaps),
        stages_(problem.cost().cluster().pipeline),
        ranks_(problem.ranks()),
        costs_(std::move(costs)) {
    for (const PassCosts& each : costs_) offloads_ = offloads_ || each.copy > 0;
    findLevels();
    const size_t devices = static_cast<size_t>(ranks_) * stages_;
    free_.assign(devices, 0.0);
    if (offloads_) {
      to_host_.assign(devices, 0.0);
      from_host_.assign(devices, 0.0);
    }
  }

  void record(SimulatedStep& step) {
    record_ = &step;
    record_->begin(ranks_);
    resident_.assign(free_.size(), 0.0);
    run();
    record_->finish(makespan_);
  }

  // Given up where the step is certain not to end before `limit`.
  double makespan(double limit) {
    if (limit < kNever) {
      limit_ = limit;
      left_ = rankTimes(problem_, plan_, costs_);
      least_ = leastMakespan(problem_, left_);
    }
    if (least_ < limit) run();
    return std::max(makespan_, least_ < limit ? 0 : least_);
  }

 private:
  // What runs in turn, level by level: passes read it from front to back.
  struct Batch {
    int32_t index = 0;
    int32_t first_rank = 0;  // of `batch_ranks_`
    int32_t num_ranks = 0;
    double forward = 0;  // seconds
    double backward = 0;
    double given = 0;  // when its last pass ends
  };

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
    const size_t count = plan_.micro_batches.size();
    std::vector<int32_t> next(ranks_, 0);
    std::vector<int32_t> level_of(count, 0);
    std::vector<int32_t> first(gaps_ ? ranks_ : 0, 0);  // level of the first slice
    size_t num_ranks = 0;
    for (size_t i = 0; i < count; ++i) {
      const std::vector<int32_t>& ranks = plan_.micro_batches[i].ranks;
      int32_t level = 0;
      for (const int32_t rank : ranks) level = std::max(level, next[rank]);
      int32_t following = level + 1;
      if (const Slice& slice = plan_.micro_batches[i].slice; gaps_ && slice.some()) {
        for (const int32_t rank : ranks) {
          if (slice.first == 0) first[rank] = level;
        }
        if (!slice.more) following += level - first[ranks.front()];
      }
      for (const int32_t rank : ranks) next[rank] = following;
      if (static_cast<size_t>(level) + 2 > levels_.size()) levels_.resize(level + 2, 0);
      ++levels_[level + 1];
      level_of[i] = level;
      num_ranks += ranks.size();
    }
    std::partial_sum(levels_.begin(), levels_.end(), levels_.begin());
    std::vector<int32_t> places(levels_.begin(), levels_.end());
    batches_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      batches_[places[level_of[i]]++].index = static_cast<int32_t>(i);
    }
    findBackwardLevels(level_of);
    batch_ranks_.reserve(num_ranks);
    for (Batch& batch : batches_) {
      const std::vector<int32_t>& ranks = plan_.micro_batches[batch.index].ranks;
      batch.first_rank = static_cast<int32_t>(batch_ranks_.size());
      batch.num_ranks = static_cast<int32_t>(ranks.size());
      batch.forward = costs_[batch.index].forward.seconds;
      batch.backward = costs_[batch.index].backward.seconds;
      batch_ranks_.insert(batch_ranks_.end(), ranks.begin(), ranks.end());
    }
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

  std::span<const int32_t> ranksOf(const Batch& batch) const {
    return {batch_ranks_.data() + batch.first_rank, static_cast<size_t>(batch.num_ranks)};
  }

  void pass(Batch& batch, int stage, bool backward) {
    const std::span<const int32_t> ranks = ranksOf(batch);
    const double seconds = backward ? batch.backward : batch.forward;
    double* const free = free_.data() + device(0, stage);
    double start = batch.given;
    for (const int32_t rank : ranks) start = std::max(start, free[rank]);
    double end = start + seconds;
    double stall = 0;
    if (offloads_ && costs_[batch.index].copy > 0) {
      double* const stream = (backward ? from_host_ : to_host_).data() + device(0, stage);
      double copied = 0;
      for (const int32_t rank : ranks) {
        stream[rank] = std::max(stream[rank], start) + costs_[batch.index].copy;
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
          backward ? stage * seconds : (stages_ - 1 - stage) * seconds + stages_ * batch.backward;
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
    for (const int32_t rank : ranksOf(batch)) {
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
  const Plan& plan_;
  const bool gaps_;
  const int stages_;
  const int ranks_;
  const std::vector<PassCosts> costs_;
  bool offloads_ = false;
  std::vector<int32_t> levels_;  // the first of `batches_` of each, and their number
  std::vector<Batch> batches_;   // by level, those of one as in the plan
  // The same for backward passes; the order is empty where it is that of `batches_`.
  std::vector<int32_t> backward_levels_, backward_order_;
  std::vector<int32_t> batch_ranks_;
  std::vector<double> free_;                 // by device: when its last pass ends
  std::vector<double> to_host_, from_host_;  // by device: when its copy stream is free
  std::vector<double> resident_;             // by device: tokens
  std::vector<RankTime> left_;               // by rank: what its last device has to run yet
  double limit_ = kNever;
  double least_ = 0;  // seconds, known before the end
  double makespan_ = 0;
  SimulatedStep* record_ = nullptr;
};

std::vector<PassCosts> costsOf(const Problem& problem, const Plan& plan, bool with_weights) {
  std::vector<PassCosts> costs;
  costs.reserve(plan.micro_batches.size());
  for (const MicroBatch& batch : plan.micro_batches) {
    costs.push_back(with_weights ? passCosts(problem, batch) : inputCosts(problem, batch));
  }
  return costs;
}

}  // namespace

SimulatedStep simulateLevels(const Problem& problem, const Plan& plan, bool with_weights,
                             bool gaps) {
  SimulatedStep step;
  LevelOrder(problem, plan, costsOf(problem, plan, with_weights), gaps).record(step);
  return step;
}

double makespanByLevels(const Problem& problem, const Plan& plan) {
  return makespanByLevels(problem, plan, costsOf(problem, plan, true),
                          std::numeric_limits<double>::infinity());
}

double makespanByLevels(const Problem& problem, const Plan& plan, std::vector<PassCosts> costs,
                        double limit, bool gaps) {
  return LevelOrder(problem, plan, std::move(costs), gaps).makespan(limit);
}

}  // namespace hdpcomm::planner
