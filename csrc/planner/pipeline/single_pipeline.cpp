#include "planner/pipeline/single_pipeline.hpp"

#include <algorithm>

namespace hdpcomm::planner {

double SinglePipeline::run(Times times, Times end) {
  const int count = static_cast<int>(end - times);
  given_.assign(count, 0.0);
  free_.assign(stages_, 0.0);
  // With passes of one second each, device s runs the forward pass of number i in second 2 i + s,
  // and its backward pass in second 2 (i + p) - 1 - s.
  for (int second = 0; second < 2 * (count + stages_) - 1; ++second) {
    for (int stage = second % 2; stage < stages_ && stage <= second; stage += 2) {
      const int i = (second - stage) / 2;
      if (i < count) pass(i, stage, forward_ * times[i]);
    }
    for (int stage = (second + 1) % 2; stage < stages_; stage += 2) {
      const int twice = second + 1 + stage - 2 * stages_;
      if (twice >= 0 && twice < 2 * count)
        pass(twice / 2, stage, (1 - forward_) * times[twice / 2]);
    }
  }
  return free_[0];
}

void SinglePipeline::pass(int i, int stage, double seconds) {
  const double end = std::max(given_[i], free_[stage]) + seconds;
  given_[i] = free_[stage] = end;
}

}  // namespace hdpcomm::planner
