// One pipeline by itself under 1F1B.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

namespace hdpcomm::planner {

// Makespan of micro-batches of these times on one pipeline under 1F1B.
class Solo {
 public:
  Solo(int stages, double forward) : stages_(stages), forward_(forward) {}

  double run(const std::deque<double>& times) {
    const int count = static_cast<int>(times.size());
    const auto at = [&](int stage, int batch) { return stage * count + batch; };
    forward_end_.assign(static_cast<size_t>(stages_) * count, -1.0);
    backward_end_.assign(static_cast<size_t>(stages_) * count, -1.0);
    std::vector<int> forwards(stages_, 0);
    std::vector<int> backwards(stages_, 0);
    std::vector<double> now(stages_, 0.0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int stage = 0; stage < stages_; ++stage) {
        for (;;) {
          const int done = backwards[stage];
          const bool full = forwards[stage] == count || forwards[stage] - done == stages_ - stage;
          if (full) {
            if (done == count) break;
            const double ready = stage + 1 == stages_ ? forward_end_[at(stage, done)]
                                                      : backward_end_[at(stage + 1, done)];
            if (ready < 0) break;
            now[stage] = std::max(now[stage], ready) + (1 - forward_) * times[done];
            backward_end_[at(stage, done)] = now[stage];
            ++backwards[stage];
          } else {
            const int next = forwards[stage];
            const double ready = stage == 0 ? 0 : forward_end_[at(stage - 1, next)];
            if (ready < 0) break;
            now[stage] = std::max(now[stage], ready) + forward_ * times[next];
            forward_end_[at(stage, next)] = now[stage];
            ++forwards[stage];
          }
          moved = true;
        }
      }
    }
    return now[0];
  }

 private:
  const int stages_;
  const double forward_;
  std::vector<double> forward_end_, backward_end_;
};

}  // namespace hdpcomm::planner
