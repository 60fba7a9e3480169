// What is planned: the sequences of one step, on a cluster and by a cost model.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

// The segments of a tree, whose tokens are in depth-first order.
struct Segments {
  std::vector<int64_t> rows;    // the first token of each
  std::vector<int64_t> starts;  // its position: the tokens before it on its way from the root
};

// The sequences of a step on a cluster.
//
// With offload a sequence may fit nowhere by itself and yet share a micro-batch with a longer one,
// whose compute hides the copies of both: it is then a *rider* of that sequence. Policies place
// every sequence that rides() on none, with its riders.
class Problem {
 public:
  // Raises InvalidUsage for a length below 1 and for a sequence that the cluster cannot hold.
  // `squares`: of each item the square of its length, or of a tree what its attention costs in the
  // same unit; empty: all are sequences. `trees`: the segments of those that may run in slices, by
  // item.
  Problem(std::vector<int64_t> lengths, const CostModel& cost, std::vector<double> squares = {},
          const std::map<int32_t, Segments>& trees = {});

  // These of the sequences, and all of them, by other costs. Raise as the constructor does.
  Problem part(const std::vector<int32_t>& sequences, const CostModel& cost) const;
  Problem withCosts(const CostModel& cost) const;
  // The same sequences on as many ranks each, by other costs.
  Problem pricedBy(const CostModel& cost) const;
  // On a cluster of the same ranks with other speeds, slices or groups.
  Problem onCluster(const Cluster& cluster) const;
  // The same sequences in at most so many slices each.
  Problem inSlices(int most) const;

  const std::vector<int64_t>& lengths() const noexcept { return lengths_; }
  const CostModel& cost() const noexcept { return cost_; }
  int ranks() const noexcept { return cost_.cluster().ranks; }
  int count() const noexcept { return static_cast<int>(lengths_.size()); }
  bool hasTrees() const noexcept { return !squares_.empty(); }
  bool hasRiders() const noexcept { return !riders_.empty(); }
  // The sums over this sequence or tree, without its riders.
  Load own(int sequence) const noexcept {
    const auto tokens = static_cast<double>(lengths_[sequence]);
    return {squares_.empty() ? tokens * tokens : squares_[sequence], tokens};
  }
  // Whether it is a tree whose segments are known.
  bool hasSegments(int32_t sequence) const { return trees_ && trees_->count(sequence) > 0; }
  // The squares of the tokens [first, end) of a sequence, or of a tree whose segments are known.
  double squares(int32_t sequence, int64_t first, int64_t end) const;
  // Fewest ranks that hold the sequence and its riders.
  int minRanks(int sequence) const noexcept { return min_ranks_[sequence]; }
  bool rides(int sequence) const noexcept { return !host_.empty() && host_[sequence] >= 0; }
  // The sequence, then its riders; and the sums over them.
  std::vector<int32_t> withRiders(int sequence) const;
  Load load(int sequence) const;
  // Positions by falling length, equal ones by position.
  const std::vector<int32_t>& byLength() const;

 private:
  struct Tree {
    Segments segments;
    std::vector<double> squares_before;  // of all tokens before each segment
  };

  std::vector<int32_t> sortedByLength() const;
  void addTree(int32_t item, const Segments& segments, std::map<int32_t, Tree>& trees) const;
  double squaresBefore(const Tree& tree, int64_t token) const;
  void findHost(int sequence);
  // Fewest ranks that hold these sequences as one micro-batch; above the cluster if none do.
  int minRanks(const std::vector<int32_t>& sequences) const;

  std::vector<int64_t> lengths_;
  std::vector<double> squares_;
  std::vector<int32_t> min_ranks_;
  std::vector<int32_t> host_;  // the sequence that each one rides on, or -1; empty: none does
  std::vector<int32_t> riders_;
  mutable std::shared_ptr<const std::vector<int32_t>> by_length_;  // once it was asked for
  std::shared_ptr<const std::map<int32_t, Tree>> trees_;  // none: all sequences are plain, or whole
  CostModel cost_;
};

// Whether each rank's share of a micro-batch fits into memory, with as much offload as hides behind
// its compute.
bool fits(const Problem& problem, const Load& load, const std::vector<int32_t>& sequences,
          int size);

}  // namespace hdpcomm::planner
