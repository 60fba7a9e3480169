#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "planner/simulate/pass_costs.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

class LevelOrder {
 public:
  LevelOrder(const Problem& problem, const LevelPasses& passes)
      : problem_(problem),
        passes_(passes),
        stages_(problem.cost().cluster().pipeline),
        kinds_(problem.cost().kinds()),
        ranks_(problem.ranks()) {
    for (const LevelPasses::Times& each : passes_.times) offloads_ = offloads_ || each.copy > 0;
    findLevels();
    const size_t devices = static_cast<size_t>(ranks_) * stages_;
    free_.assign(devices, 0.0);
    if (offloads_) {
      to_host_.assign(devices, 0.0);
      from_host_.assign(devices, 0.0);
    }
  }

  // `costs`: of the micro-batches.
  void record(SimulatedStep& step, const PlanCosts& costs) {
    record_ = &step;
    costs_ = &costs;
    record_->begin(ranks_);
    resident_.assign(free_.size(), 0.0);
    run();
    record_->finish(makespan_);
  }

  // Given up where the step is certain not to end before `limit`.
  double makespan(double limit) {
    if (limit < kNever) {
      limit_ = limit;
      findLeft();
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
  struct Left {       // of a rank
    double busy;      // what its last device has to run yet
    double way_back;  // of the last pass there to the first device, at least
  };

  std::span<const LevelPasses::Times> timesOf(size_t batch) const {
    return {&passes_.times[batch * kinds_], kinds_};
  }

  void findLeft() {
    RankTimes times(problem_);
    for (size_t i = 0; i < passes_.batches.size(); ++i) {
      for (const int32_t rank : ranksOf(passes_.batches[i])) {
        int kind = 0;
        for (const auto& each : timesOf(i)) times.add(rank, kind++, each.forward, each.backward);
      }
    }
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      left_.push_back({times.busy(rank, stages_ - 1), times.wayBack(rank, stages_ - 1)});
    }
    least_ = times.leastMakespan();
  }

  void run() {
    const int levels = static_cast<int>(levels_.size()) - 1;
    const int* const kind_of = problem_.cost().kindOf().data();
    // With passes of one second each, device s runs the forward pass of level l in second 2 l + s,
    // and its backward pass in second 2 (l + p) - 1 - s.
    for (int second = 0; second < 2 * (levels + stages_) - 1; ++second) {
      for (int stage = 0; stage < stages_; ++stage) {
        const bool backward = (second - stage) % 2 != 0;
        const int level = (backward ? second + 1 + stage - 2 * stages_ : second - stage) / 2;
        const bool before = backward ? second + 1 + stage < 2 * stages_ : second < stage;
        if (before || level >= levels) continue;
        for (int32_t i = levels_[level]; i < levels_[level + 1]; ++i) {
          pass(batches_[i], stage, backward, timesOf(batches_[i].index)[kind_of[stage]]);
        }
        if (least_ >= limit_) return;
      }
    }
  }

  void findLevels() {
    const size_t count = passes_.batches.size();
    std::vector<int32_t> next(ranks_, 0);
    std::vector<int32_t> level_of(count, 0);
    for (size_t i = 0; i < count; ++i) {
      const std::span<const int32_t> ranks = ranksOf(passes_.batches[i]);
      int32_t level = 0;
      for (const int32_t rank : ranks) level = std::max(level, next[rank]);
      for (const int32_t rank : ranks) next[rank] = level + 1;
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
  }

  size_t device(int32_t rank, int stage) const {
    return static_cast<size_t>(stage) * ranks_ + rank;
  }

  std::span<const int32_t> ranksOf(const LevelPasses::Batch& batch) const {
    return {passes_.ranks.data() + batch.first_rank, static_cast<size_t>(batch.num_ranks)};
  }

  void pass(Batch& batch, int stage, bool backward, const LevelPasses::Times& times) {
    const std::span<const int32_t> ranks = ranksOf(batch.passes);
    const double seconds = backward ? times.backward : times.forward;
    double* const free = free_.data() + device(0, stage);
    double start = batch.given;
    for (const int32_t rank : ranks) start = std::max(start, free[rank]);
    double end = start + seconds;
    double stall = 0;
    if (offloads_ && times.copy > 0) {
      double* const stream = (backward ? from_host_ : to_host_).data() + device(0, stage);
      double copied = 0;
      for (const int32_t rank : ranks) {
        stream[rank] = std::max(stream[rank], start) + times.copy;
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
      LevelPasses::Times least = times;
      for (const LevelPasses::Times& each : timesOf(batch.index)) {
        least.forward = std::min(least.forward, each.forward);
        least.backward = std::min(least.backward, each.backward);
      }
      const double way = backward
                             ? stage * least.backward
                             : (stages_ - 1 - stage) * least.forward + stages_ * least.backward;
      least_ = std::max(least_, (end + way) * (1 - kRounding));
    }
    if (limit_ < kNever && stage + 1 == stages_) {
      for (const int32_t rank : ranks) least_ = std::max(least_, leastEnd(rank, end, seconds));
    }
    if (record_ != nullptr) recordPass(batch, stage, backward, {start, end, stall});
  }

  // When a rank ends at least, once its last device has run a pass.
  double leastEnd(int32_t rank, double end, double seconds) {
    Left& left = left_[rank];
    left.busy -= seconds;
    return (end + left.busy + left.way_back) * (1 - kRounding);
  }

  struct Times {
    double start, end, stall;
  };

  void recordPass(const Batch& batch, int stage, bool backward, const Times& times) {
    const PassCosts& cost = costs_->on(batch.index, stage);
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
  const int stages_;
  const size_t kinds_;  // of stages
  const int ranks_;
  const PlanCosts* costs_ = nullptr;  // where the step is recorded
  bool offloads_ = false;
  std::vector<int32_t> levels_;              // the first of `batches_` of each, and their number
  std::vector<Batch> batches_;               // by level, those of one as in the plan
  std::vector<double> free_;                 // by device: when its last pass ends
  std::vector<double> to_host_, from_host_;  // by device: when its copy stream is free
  std::vector<double> resident_;             // by device: tokens
  std::vector<Left> left_;                   // by rank
  double limit_ = kNever;
  double least_ = 0;  // seconds, known before the end
  double makespan_ = 0;
  SimulatedStep* record_ = nullptr;
};

LevelPasses passesOf(const Plan& plan, const PlanCosts& costs) {
  LevelPasses passes;
  passes.batches.reserve(plan.micro_batches.size());
  passes.ranks.reserve(plan.micro_batches.size());
  for (size_t i = 0; i < plan.micro_batches.size(); ++i) {
    const std::vector<int32_t>& ranks = plan.micro_batches[i].ranks;
    passes.ranks.insert(passes.ranks.end(), ranks.begin(), ranks.end());
    for (const PassCosts& each : costs.onKinds(i)) passes.add(each);
    passes.add();
  }
  return passes;
}

}  // namespace

void LevelPasses::add() {
  const int32_t first = batches.empty() ? 0 : batches.back().first_rank + batches.back().num_ranks;
  batches.push_back({first, static_cast<int32_t>(ranks.size()) - first});
}

SimulatedStep simulateLevels(const Problem& problem, const Plan& plan) {
  SimulatedStep step;
  const PlanCosts costs(problem, plan);
  LevelOrder(problem, passesOf(plan, costs)).record(step, costs);
  return step;
}

double makespanByLevels(const Problem& problem, const Plan& plan) {
  return makespanByLevels(problem, passesOf(plan, PlanCosts(problem, plan)),
                          std::numeric_limits<double>::infinity());
}

double makespanByLevels(const Problem& problem, const LevelPasses& passes, double limit) {
  return LevelOrder(problem, passes).makespan(limit);
}

}  // namespace hdpcomm::planner
