// What 1F1B leaves idle around the longest micro-batches of a pipeline (claim 10 of
// docs/bound.md; bound.cpp uses it). While the first of them goes down the stages and the last
// one comes back, a device has at most p - 1 other micro-batches in flight, and these are shorter.
#pragma once

#include <vector>

#include "planner/bound/pass_times.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class PipelineWindows {
 public:
  // Rank-seconds that the bound charges, for one possible time of the step.
  struct Charges {
    double all = 0;                  // of all sequences
    double held = 1;                 // most tokens that a rank holds of one micro-batch,
    double sequence = 1;             // of one sequence,
    double beside = 0;               // and in flight beside one micro-batch
    std::vector<double> beyond_one;  // by length: of the sequences that need several ranks, what
                                     // these cost more than one; 0 for the others
  };

  // `filling`: least idle seconds of a pipeline, whatever it runs.
  PipelineWindows(const Problem& problem, double filling);

  // Whether all sequences can be run within `time`; `least`: fewest ranks of the longest one.
  bool fit(double time, int least, const Charges& charges);

 private:
  int leastRanks(const Load& load) const;

  // Whether the `count` longest sequences, J, can lie on a number of ranks from `low` to `high`.
  // Tests the ranges that can only be wrong by taking the better end for each term, and halves
  // those that pass; small ones count as possible.
  bool fitsOn(size_t count, int low, int high, const PassTimes& times) const;

  bool mayFit(size_t count, int low, int high, const PassTimes& times) const;

  // How much of `work` on sequences from `count` on can be done in the windows on `ranks` ranks, at
  // most: one pass of p - 1 micro-batches, and the other pass of p - 1 other ones.
  double hidden(size_t count, int ranks, double work) const;

  // Charge of the first tokens, longest sequences first, whose charge per token is the largest.
  double workOfTokens(double tokens) const;
  double workOf(size_t count) const;

  const Problem& problem_;
  const CostModel& cost_;
  const double filling_;
  const int others_;  // micro-batches in flight beside one
  double forward_ = 0;
  double backward_ = 0;
  std::vector<double> tokens_;   // of the first ones by falling length
  std::vector<double> squares_;  // of these
  std::vector<double> beyond_;   // of these: what several ranks cost more than one
  std::vector<size_t> counts_;   // how many of the longest sequences are tried
  double held_ = 1;              // of the charges
  double sequence_ = 1;
  double beside_ = 0;
  double all_ = 0;
  double time_ = 0;
};

}  // namespace hdpcomm::planner
