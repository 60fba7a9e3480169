// What all plans end with: their order, their costs and their makespan.
#pragma once

#include <limits>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Sorts by start (equal ones stay in place), prices, and finds the makespan, with a pipeline that
// of the simulated schedule. Where a plan is certain not to end before `limit`, its makespan is one
// that it does not beat, and not below the limit.
Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches,
                double limit = std::numeric_limits<double>::infinity());

// The same for micro-batches that have no start, in their order, and whose ranks are sorted: it
// puts them into ring order.
Plan finishWithRings(const Problem& problem, std::vector<MicroBatch> batches, double limit);

// Each micro-batch starts when the last of its ranks is free.
class InOrder {
 public:
  explicit InOrder(int ranks) : ready_(ranks, 0.0) {}

  void run(const MicroBatch& batch);

  double makespan() const noexcept { return makespan_; }

 private:
  std::vector<double> ready_;
  double makespan_ = 0;
};

// Tells while a plan is made that it does not end before a limit, so that the rest of it need not
// be made. Pipelines do not run like that: it tells nothing of them.
class LimitCheck {
 public:
  LimitCheck(const Problem& problem, double limit);

  // Adds the next micro-batch, whose ranks are sorted. True if the plan is certain to be late.
  bool late(MicroBatch& batch);

  // A plan without micro-batches, for the one that is late.
  Plan latePlan() const;

 private:
  const Problem& problem_;
  const double limit_;
  InOrder flat_;
};

}  // namespace hdpcomm::planner
