// What the simulation of a step finds out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace hdpcomm::planner {

struct Span {
  int32_t micro_batch = 0;
  int32_t stage = 0;  // of the model
  bool backward = false;
  double start = 0;
  double end = 0;
  int32_t weights_of = -1;  // the rank that computes gradients of weights, which it does alone
};

struct SimulatedStep {
  std::vector<Span> spans;          // by start
  std::vector<double> busy;         // by rank: seconds of compute, summed over its stages
  std::vector<double> exposed;      // by rank: seconds in which a ring waits for KV
  std::vector<double> stalled;      // by rank: seconds in which compute waits for host copies
  std::vector<double> end;          // by rank: when its last backward pass ends
  std::vector<double> peak_tokens;  // by rank: most tokens on the device at once, without the
                                    // offloaded share, on the worst stage
  double makespan = 0;

  // Forgets everything; the figures of each rank are 0.
  void begin(int ranks) {
    *this = SimulatedStep{};
    for (auto* values : {&busy, &exposed, &stalled, &end, &peak_tokens}) values->assign(ranks, 0.0);
  }

  // Sorts the spans by start. A pass starts no earlier than those that it needs and stands behind
  // them, so it stays there.
  void finish(double seconds) {
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span& a, const Span& b) { return a.start < b.start; });
    makespan = seconds;
  }
};

}  // namespace hdpcomm::planner
