#include "planner/simulate/simulator.hpp"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/simulate/pass_costs.hpp"

namespace hdpcomm::planner {
namespace {

// How long a device has to wait, in gradients of weights, to begin with one: more than one begins
// late what comes next, and less leaves the device idle. Below 0: it does not put them off.
constexpr double kWaits[] = {-1, 0.25, 1};

constexpr double kForever = std::numeric_limits<double>::infinity();

// Pipelines with split backward passes (Qi et al., arXiv 2401.10241): a backward pass gives the
// gradients of its inputs, which the stage before waits for; those of the weights come later, where
// the device would wait. Forward and backward passes keep an order of 1F1B. A device owes gradients
// to no more micro-batches at a time than the first device of a pipeline does under 1F1B, so the
// most that any device holds does not grow (the paper's ZB-H1).
class SplitOrder {
 public:
  SplitOrder(const Problem& problem, const Plan& plan)
      : plan_(plan),
        devices_(problem.cost().cluster().pipeline),
        ranks_(problem.ranks()),
        most_(mostInFlight(problem.cost().cluster(), 0)),
        most_held_(problem.cost().cluster().mostHeld() *
                   static_cast<double>(problem.cost().memory().capacity)),
        costs_(problem, plan) {
    const RankTimes times(problem, plan, costs_);
    for (int device = 0; device < devices_; ++device) {
      for (int32_t rank = 0; rank < ranks_; ++rank) left_.push_back(times.busy(rank, device));
    }
    slices_ = std::any_of(plan.micro_batches.begin(), plan.micro_batches.end(),
                          [](const MicroBatch& batch) { return batch.slice.some(); });
  }

  // Runs the forward and backward passes in this order; `record` may be null. Returns the makespan,
  // or infinity as soon as it is certain not to be below `limit`.
  double run(const std::vector<Span>& order, double wait, double limit, SimulatedStep* record) {
    const size_t count = static_cast<size_t>(devices_) * ranks_;
    units_.assign(count, Unit{});
    for (size_t i = 0; i < count; ++i) units_[i].left = left_[i];
    given_.assign(plan_.micro_batches.size(), 0.0);
    wait_ = wait;
    makespan_ = 0;
    record_ = record;
    if (record_ != nullptr) record_->begin(ranks_);
    for (const Span& span : order) {
      if (leastAfter(span) * (1 - kRounding) >= limit) return kForever;
    }
    for (int device = 0; device < devices_; ++device) {
      for (int32_t rank = 0; rank < ranks_; ++rank) {
        while (!unit(rank, device).owed.empty()) computeWeights(rank, device);
      }
    }
    if (record_ != nullptr) record_->finish(makespan_);
    return makespan_;
  }

 private:
  struct Unit {          // one device of one rank
    double free = 0;     // when its last pass ends
    double to_host = 0;  // when its copy streams are free
    double from_host = 0;
    double resident = 0;                           // tokens
    double left = 0;                               // seconds of what it has yet to run
    int in_flight = 0;                             // micro-batches whose gradients are not complete
    std::deque<std::pair<int32_t, int32_t>> owed;  // (micro-batch, stage): gradients of weights
  };

  Unit& unit(int32_t rank, int device) {
    return units_[static_cast<size_t>(device) * ranks_ + rank];
  }

  void computeWeights(int32_t rank, int device) {
    Unit& self = unit(rank, device);
    const auto [index, stage] = self.owed.front();
    self.owed.pop_front();
    const PassCosts& cost = costs_.on(index, stage);
    const double start = self.free;
    self.free += cost.weights;
    self.left -= cost.weights;
    self.resident -= cost.resident;
    --self.in_flight;
    makespan_ = std::max(makespan_, self.free);
    if (record_ == nullptr) return;
    record_->busy[rank] += cost.weights;
    record_->end[rank] = std::max(record_->end[rank], self.free);
    record_->spans.push_back({index, stage, true, start, self.free, rank});
  }

  double startOf(const MicroBatch& batch, int32_t index, int device) {
    double start = given_[index];
    for (const int32_t rank : batch.ranks) start = std::max(start, unit(rank, device).free);
    return start;
  }

  // Computes gradients of weights where memory asks for it, or the device would wait.
  void fill(const MicroBatch& batch, const Span& span, int device) {
    for (const int32_t rank : batch.ranks) {
      Unit& self = unit(rank, device);
      const bool full = !span.backward && self.in_flight >= most_;
      if (full && !self.owed.empty()) computeWeights(rank, device);
      // Slices are of fewer tokens than other micro-batches, and there are more of them.
      const double more =
          span.backward || !slices_ ? 0 : costs_.on(span.micro_batch, span.stage).resident;
      while (more > 0 && self.resident + more > most_held_ && !self.owed.empty()) {
        computeWeights(rank, device);
      }
    }
    const double start = startOf(batch, span.micro_batch, device);
    for (const int32_t rank : batch.ranks) {
      Unit& self = unit(rank, device);
      while (!self.owed.empty()) {
        const double idle = start - self.free;
        const auto [owed, owed_stage] = self.owed.front();
        const double least = wait_ * costs_.on(owed, owed_stage).weights;
        if (wait_ >= 0 && (idle <= 0 || idle < least)) break;
        computeWeights(rank, device);
      }
    }
  }

  // Runs it; returns the seconds that the step takes at least.
  double leastAfter(const Span& span) {
    const MicroBatch& batch = plan_.micro_batches[span.micro_batch];
    const PassCosts& cost = costs_.on(span.micro_batch, span.stage);
    const PassCosts::Pass& part = span.backward ? cost.backward : cost.forward;
    const double seconds = part.seconds - (span.backward ? cost.weights : 0);
    const int device = span.stage % devices_;
    fill(batch, span, device);
    const double start = startOf(batch, span.micro_batch, device);
    double end = start + seconds;
    double stall = 0;
    if (cost.copy > 0) {
      double copied = 0;
      for (const int32_t rank : batch.ranks) {
        Unit& self = unit(rank, device);
        double& stream = span.backward ? self.from_host : self.to_host;
        stream = std::max(stream, start) + cost.copy;
        copied = std::max(copied, stream);
      }
      stall = std::max(0.0, copied - end);
      end += stall;
    }
    given_[span.micro_batch] = end;
    makespan_ = std::max(makespan_, end);
    double least = makespan_;
    for (const int32_t rank : batch.ranks) {
      Unit& self = unit(rank, device);
      self.free = end;
      self.left -= seconds;
      least = std::max(least, end + self.left);
      if (span.backward) {
        self.owed.emplace_back(span.micro_batch, span.stage);
      } else {
        ++self.in_flight;
        self.resident += cost.resident;
      }
      if (record_ == nullptr) continue;
      record_->peak_tokens[rank] = std::max(record_->peak_tokens[rank], self.resident);
      record_->busy[rank] += seconds - part.exposed;
      record_->exposed[rank] += part.exposed;
      record_->stalled[rank] += stall;
    }
    if (record_ != nullptr) {
      record_->spans.push_back({span.micro_batch, span.stage, span.backward, start, end});
    }
    return least;
  }

  static constexpr double kRounding = 1e-9;  // of sums

  const Plan& plan_;
  const int devices_;
  const int32_t ranks_;
  const int most_;          // micro-batches of a device whose gradients are not complete
  const double most_held_;  // tokens of these
  bool slices_ = false;     // whether there are any
  const PlanCosts costs_;
  std::vector<double> left_;  // by device and rank: seconds of all that it runs
  std::vector<Unit> units_;
  std::vector<double> given_;  // by micro-batch: when its last pass but those of weights ends
  double wait_ = 0;
  double makespan_ = 0;
  SimulatedStep* record_ = nullptr;
};

// Whether it may run in the order by levels.
bool runsByLevels(const Problem& problem, const Plan& plan) {
  const Cluster& cluster = problem.cost().cluster();
  return cluster.pipeline > 1 && cluster.chunks == 1 &&
         std::none_of(plan.micro_batches.begin(), plan.micro_batches.end(),
                      [](const MicroBatch& batch) { return batch.slice.some(); });
}

// The shortest of a few such orders, never longer than 1F1B with whole backward passes. Nothing is
// recorded where it is certain not to end before `limit`.
SimulatedStep simulateSplit(const Problem& problem, const Plan& plan, double limit, bool record) {
  std::vector<std::vector<Span>> orders;
  orders.push_back(simulatePriorities(problem, plan).spans);
  if (runsByLevels(problem, plan)) {
    orders.push_back(simulateLevels(problem, plan).spans);
  }
  SplitOrder split(problem, plan);
  const std::vector<Span>* best = nullptr;
  SimulatedStep step;
  step.makespan = limit;
  double best_wait = 0;
  for (const std::vector<Span>& order : orders) {
    for (const double wait : kWaits) {
      const double makespan = split.run(order, wait, step.makespan, nullptr);
      if (makespan >= step.makespan) continue;
      best = &order;
      step.makespan = makespan;
      best_wait = wait;
    }
  }
  if (record && best != nullptr) split.run(*best, best_wait, kForever, &step);
  return step;
}

}  // namespace

SimulatedStep simulate(const Problem& problem, const Plan& plan) {
  if (problem.cost().cluster().split) return simulateSplit(problem, plan, kForever, true);
  SimulatedStep step = simulatePriorities(problem, plan);
  if (!runsByLevels(problem, plan)) return step;
  return makespanByLevels(problem, plan) < step.makespan ? simulateLevels(problem, plan)
                                                         : std::move(step);
}

double simulatedMakespan(const Problem& problem, const Plan& plan, double limit) {
  const Cluster& cluster = problem.cost().cluster();
  if (cluster.pipeline > 1 && limit < kForever) {
    const double least = RankTimes(problem, plan, PlanCosts(problem, plan)).leastMakespan();
    if (least >= limit) return least;
  }
  if (cluster.split) return simulateSplit(problem, plan, limit, false).makespan;
  if (!runsByLevels(problem, plan)) return makespanByPriorities(problem, plan, limit);
  const double by_levels = makespanByLevels(problem, plan);
  return std::min(by_levels, makespanByPriorities(problem, plan, std::min(by_levels, limit)));
}

}  // namespace hdpcomm::planner
