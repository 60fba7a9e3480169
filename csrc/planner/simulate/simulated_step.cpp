#include "planner/simulate/simulated_step.hpp"

#include <algorithm>

namespace hdpcomm::planner {

void SimulatedStep::begin(int ranks) {
  *this = SimulatedStep{};
  for (auto* values : {&busy, &exposed, &stalled, &end, &peak_tokens}) values->assign(ranks, 0.0);
}

void SimulatedStep::finish(double seconds) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const Span& a, const Span& b) { return a.start < b.start; });
  makespan = seconds;
}

}  // namespace hdpcomm::planner
