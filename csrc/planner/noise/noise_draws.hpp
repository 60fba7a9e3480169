// Possible steps, in which micro-batches take longer or shorter than predicted: random factors that
// are the same on every machine, and when each rank is free in each of these steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Random factors of the micro-batch that each sequence is the first of, in a number of possible
// steps: half of these mirror the others, and the deviation over all of them is exact.
class NoiseDraws {
 public:
  NoiseDraws(size_t sequences, int steps, double noise)
      : steps_(steps), factors_(sequences * steps) {
    const size_t half = steps / 2;
    Xorshift random;
    std::vector<double> normal(half);
    float* next = factors_.data();
    for (size_t i = 0; i < sequences; ++i, next += steps) {
      double squares = 0;
      for (double& value : normal) {
        value = -6;  // a sum of twelve uniform numbers: nearly normal, and the same on any machine
        for (int term = 0; term < 12; ++term) value += random.unit();
        squares += value * value;
      }
      const double scale = noise / std::sqrt(squares / static_cast<double>(half));
      for (size_t k = 0; k < half; ++k) {
        next[k] = static_cast<float>(std::max(0.0, 1 + scale * normal[k]));
        next[half + k] = static_cast<float>(std::max(0.0, 1 - scale * normal[k]));
      }
    }
  }

  int steps() const noexcept { return steps_; }
  const float* of(int32_t sequence) const noexcept {
    return factors_.data() + static_cast<size_t>(sequence) * steps_;
  }

 private:
  int steps_;
  std::vector<float> factors_;
};

// Seconds of a micro-batch that vary, and those that do not.
struct Certainty {
  double compute = 0;
  double wait = 0;
};
Certainty certaintyOf(const Problem& problem, const MicroBatch& batch);

// When micro-batches end in each possible step, run in their order.
class DrawnEnds {
 public:
  DrawnEnds(const Problem& problem, const std::vector<MicroBatch>& batches,
            const NoiseDraws& draws);

  int steps() const noexcept { return steps_; }
  // When a rank has run all of its micro-batches.
  double ofRank(int rank, int step) const noexcept {
    return last_[rank] < 0 ? 0.0 : ends_[static_cast<size_t>(last_[rank]) * steps_ + step];
  }
  // When all ranks have.
  double makespan(int step) const noexcept { return makespans_[step]; }
  double meanMakespan() const noexcept;

 private:
  int steps_;
  std::vector<float> ends_;  // by micro-batch, then by step
  std::vector<float> makespans_;
  std::vector<int64_t> last_;  // micro-batch of each rank, or -1
};

// An even number of possible steps: at most `most`, fewer where `count` numbers for each are more
// than `times`, and at least `fewest`.
int drawsFor(size_t count, size_t times, int fewest, int most) noexcept;

// A plan in two parts: the micro-batches that ranks share or that keep memory by offload, with
// what comes before them on these ranks; and the sequences that ranks run by themselves after them,
// those that take longest first.
struct Tails {
  std::vector<MicroBatch> shared;
  std::vector<int32_t> sequences;
};
Tails takeTails(const Problem& problem, const Plan& plan);
void sortByTime(const Problem& problem, std::vector<int32_t>& sequences);

}  // namespace hdpcomm::planner
