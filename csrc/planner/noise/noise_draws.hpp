// Possible steps, in which micro-batches take longer or shorter than predicted: random factors that
// are the same on every machine, and when each rank is free in each of these steps.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Random factors of the micro-batch that each sequence is the first of, in a number of possible
// steps: half of these mirror the others, and the deviation over all of them is exact.
class NoiseDraws {
 public:
  NoiseDraws(size_t sequences, int steps, double noise);

  int steps() const noexcept { return steps_; }
  // Drawn when they are asked for: few sequences are the first of a micro-batch.
  const float* of(int32_t sequence) const;

 private:
  static constexpr int kTerms = 12;  // uniform numbers, whose sum a factor is made of
  static constexpr int kChains = 4;  // of these numbers that are drawn at a time

  const float* draw(int32_t sequence) const;

  int steps_;
  double noise_;
  int chain_;                                // factors of each chain but the last one
  Xorshift::Leap leap_;                      // from the numbers of a chain to those of the next one
  mutable std::vector<const float*> drawn_;  // by sequence; null: not yet
  std::vector<Xorshift> random_;             // by sequence: where its numbers begin
  mutable std::vector<std::unique_ptr<float[]>> factors_;  // of many sequences each
  mutable size_t left_ = 0;  // sequences that the last one has room for
  mutable std::vector<double> normal_;
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
  // Ends where the mean of all steps is certain not to be below `limit`.
  DrawnEnds(const Problem& problem, const std::vector<MicroBatch>& batches, const NoiseDraws& draws,
            double limit = std::numeric_limits<double>::infinity());
  // None yet, and room for so many; add() runs them.
  DrawnEnds(const Problem& problem, size_t batches, const NoiseDraws& draws);

  void add(const MicroBatch& batch);

  int steps() const noexcept { return steps_; }
  // When a rank has run all of its micro-batches.
  double ofRank(int rank, int step) const noexcept;
  // When all ranks have.
  double makespan(int step) const noexcept { return makespans_[step]; }
  // Their mean; not below the limit, if these ends do not go on behind it.
  double meanMakespan() const noexcept;

 private:
  const Problem& problem_;
  const NoiseDraws& draws_;
  int steps_;
  std::unique_ptr<float[]> ends_;  // by row, then by step
  std::vector<float> makespans_;
  std::vector<int64_t> row_;       // of each rank's last micro-batch, which its ranks share; or -1
  std::vector<int64_t> unused_;    // rows
  std::vector<int32_t> ranks_of_;  // by row: how many ranks have it
  std::vector<int64_t> before_;    // rows of the ranks of a micro-batch
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
// Which micro-batches of a plan are those of `shared`.
std::vector<bool> sharedOnes(const Problem& problem, const Plan& plan);
void sortByTime(const Problem& problem, std::vector<int32_t>& sequences);

}  // namespace hdpcomm::planner
