// The sequences of a step that a lower bound takes one by one, in classes of about equal length,
// and what the passes of their micro-batches take (docs/bound.md, claim 15).
#pragma once

#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class LongSequences {
 public:
  struct Passes {
    double forward = 0;
    double backward = 0;
    double seconds() const { return forward + backward; }
  };
  struct Size {
    int ranks = 1;
    Passes passes;
  };
  struct Class {
    Load load;  // of its shortest sequence
    double count = 0;
    std::vector<Size> sizes;  // more ranks, less time
    double gain = 0;
  };
  struct Together {
    int number = 2;  // of sequences, each as long as the shortest one
    int ranks = 1;
    Passes passes;
  };

  static constexpr int kMaxTogether = 16;

  explicit LongSequences(const Problem& problem);

  // Makes classes of the `count` longest sequences. False if they cannot be held.
  bool choose(size_t count);

  // Rank-seconds of a sequence in a micro-batch that takes about this long.
  static double price(const Class& each, double wanted);

  // The most weight for a second of compute on so many ranks.
  double slopeOn(int size) const;

  std::vector<Load> loads;     // of all sequences, by falling length
  double held = 1;             // most tokens of a micro-batch on a rank
  std::vector<Class> classes;  // of the long sequences, by falling length
  std::vector<Together> together;
  double least = 0;                        // seconds of a micro-batch with one of them
  double others_work = 0;                  // rank-seconds of the others
  double densest = 0;                      // most work of a token of these
  double least_share = 0, most_share = 1;  // of forward passes

 private:
  static constexpr int kMaxClasses = 24;
  static constexpr int kOneByOne = 1024;  // ranks, above which sizes are taken together

  Passes passesOf(const Load& load, int size) const;

  // All numbers of ranks on which a pass ends earlier than on fewer ones.
  std::vector<Size> sizesOf(const Load& load);

  // Rank-seconds of a sequence on one rank, without what each micro-batch costs.
  double work(const Load& load) const;

  int leastRanks(double tokens) const;

  void noteLeast(const std::vector<Size>& sizes);

  // How much of their work the other sequences add to a micro-batch of a long one, at least: where
  // it waits for messages they may add those only.
  void grow(const Load& load, int size);

  // Micro-batches of several of the long sequences.
  void findTogether();

  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const CostModel& cost_;
  const int ranks_;
  double longest_other_ = 0, shortest_other_ = 0;
  double growth_ = 1;
};

}  // namespace hdpcomm::planner
