#include "planner/simulate/level_order.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {
namespace {

class LevelOrder {
 public:
  LevelOrder(const Problem& problem, const Plan& plan, bool with_weights)
      : plan_(plan), stages_(problem.cost().cluster().pipeline), ranks_(problem.ranks()) {
    costs_.reserve(plan.micro_batches.size());
    for (const MicroBatch& batch : plan.micro_batches) {
      costs_.push_back(with_weights ? passCosts(problem, batch) : inputCosts(problem, batch));
      offloads_ = offloads_ || costs_.back().copy > 0;
    }
    findLevels();
    const size_t devices = static_cast<size_t>(ranks_) * stages_;
    free_.assign(devices, 0.0);
    if (offloads_) {
      to_host_.assign(devices, 0.0);
      from_host_.assign(devices, 0.0);
    }
    given_.assign(plan.micro_batches.size(), 0.0);
  }

  double run(SimulatedStep* record) {
    record_ = record;
    if (record_ != nullptr) {
      record_->begin(ranks_);
      resident_.assign(free_.size(), 0.0);
    }
    const int levels = static_cast<int>(levels_.size());
    // With passes of one second each, device s runs the forward pass of level l in second 2 l + s,
    // and its backward pass in second 2 (l + p) - 1 - s.
    for (int second = 0; second < 2 * (levels + stages_) - 1; ++second) {
      for (int stage = 0; stage < stages_; ++stage) {
        const bool backward = (second - stage) % 2 != 0;
        const int level = (backward ? second + 1 + stage - 2 * stages_ : second - stage) / 2;
        const bool before = backward ? second + 1 + stage < 2 * stages_ : second < stage;
        if (before || level >= levels) continue;
        for (const int32_t index : levels_[level]) pass(index, stage, backward);
      }
    }
    if (record_ != nullptr) record_->finish(makespan_);
    return makespan_;
  }

 private:
  void findLevels() {
    std::vector<int> next(ranks_, 0);
    for (size_t i = 0; i < plan_.micro_batches.size(); ++i) {
      int level = 0;
      for (const int32_t rank : plan_.micro_batches[i].ranks) level = std::max(level, next[rank]);
      for (const int32_t rank : plan_.micro_batches[i].ranks) next[rank] = level + 1;
      if (level == static_cast<int>(levels_.size())) levels_.emplace_back();
      levels_[level].push_back(static_cast<int32_t>(i));
    }
  }

  size_t device(int32_t rank, int stage) const {
    return static_cast<size_t>(stage) * ranks_ + rank;
  }

  void pass(int32_t index, int stage, bool backward) {
    const MicroBatch& batch = plan_.micro_batches[index];
    const PassCosts& cost = costs_[index];
    const PassCosts::Pass& part = backward ? cost.backward : cost.forward;
    double* const free = free_.data() + device(0, stage);
    double start = given_[index];
    for (const int32_t rank : batch.ranks) start = std::max(start, free[rank]);
    double end = start + part.seconds;
    double stall = 0;
    if (cost.copy > 0) {
      double* const stream = (backward ? from_host_ : to_host_).data() + device(0, stage);
      double copied = 0;
      for (const int32_t rank : batch.ranks) {
        stream[rank] = std::max(stream[rank], start) + cost.copy;
        copied = std::max(copied, stream[rank]);
      }
      stall = std::max(0.0, copied - end);
      end += stall;
    }
    for (const int32_t rank : batch.ranks) free[rank] = end;
    given_[index] = end;
    makespan_ = std::max(makespan_, end);
    if (record_ == nullptr) return;
    for (const int32_t rank : batch.ranks) {
      double& resident = resident_[device(rank, stage)];
      resident += backward ? -cost.resident : cost.resident;
      record_->peak_tokens[rank] = std::max(record_->peak_tokens[rank], resident);
      record_->busy[rank] += part.seconds - part.exposed;
      record_->exposed[rank] += part.exposed;
      record_->stalled[rank] += stall;
      if (backward) record_->end[rank] = std::max(record_->end[rank], end);
    }
    record_->spans.push_back({index, stage, backward, start, end});
  }

  const Plan& plan_;
  const int stages_;
  const int ranks_;
  bool offloads_ = false;
  std::vector<PassCosts> costs_;
  std::vector<std::vector<int32_t>> levels_;  // the micro-batches of each
  std::vector<double> free_;                  // by device: when its last pass ends
  std::vector<double> to_host_, from_host_;   // by device: when its copy stream is free
  std::vector<double> given_;                 // by micro-batch: when its last pass ends
  std::vector<double> resident_;              // by device: tokens
  double makespan_ = 0;
  SimulatedStep* record_ = nullptr;
};

}  // namespace

SimulatedStep simulateLevels(const Problem& problem, const Plan& plan, bool with_weights) {
  SimulatedStep step;
  LevelOrder(problem, plan, with_weights).run(&step);
  return step;
}

double makespanByLevels(const Problem& problem, const Plan& plan) {
  return LevelOrder(problem, plan, true).run(nullptr);
}

}  // namespace hdpcomm::planner
