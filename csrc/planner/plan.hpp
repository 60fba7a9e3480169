// The plan of one step: micro-batches in one global order. Each rank runs its own in that order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/cost_model.hpp"
#include "planner/rings.hpp"

namespace hdpcomm::planner {

struct MicroBatch {
  std::vector<int32_t> ranks;      // in ring order
  std::vector<int32_t> sequences;  // positions in the given lengths
  double offload = 0;              // ratio, 0 to 1
  double predicted_s = 0;
  double start = 0;  // while solving: the desired start, which sets the order
};

struct Plan {
  std::vector<MicroBatch> micro_batches;  // in the global order
  double makespan = 0;
  double idle_share = 0;  // of ranks x makespan
};

// Options that only some policies read.
struct PolicyOptions {
  int64_t context = 0;    // static: longest sequence that the mesh has to hold; 0: of this batch
  int context_ranks = 0;  // static: size of the context-parallel groups; 0: the smallest that fits
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
  // same unit; empty: all are sequences.
  Problem(std::vector<int64_t> lengths, const CostModel& cost, std::vector<double> squares = {});

  // The same sequences on ranks of these speeds.
  Problem withSpeeds(std::vector<double> speeds) const;
  // The same sequences in groups of neighbouring ranks (Cluster::neighbours).
  Problem onNeighbours() const;

  const std::vector<int64_t>& lengths() const noexcept { return lengths_; }
  const CostModel& cost() const noexcept { return cost_; }
  int ranks() const noexcept { return cost_.cluster().ranks; }
  int count() const noexcept { return static_cast<int>(lengths_.size()); }
  bool hasTrees() const noexcept { return !squares_.empty(); }
  // The sums over this sequence or tree, without its riders.
  Load own(int sequence) const noexcept {
    const auto tokens = static_cast<double>(lengths_[sequence]);
    return {squares_.empty() ? tokens * tokens : squares_[sequence], tokens};
  }
  // Fewest ranks that hold the sequence and its riders.
  int minRanks(int sequence) const noexcept { return min_ranks_[sequence]; }
  bool rides(int sequence) const noexcept { return !host_.empty() && host_[sequence] >= 0; }
  // The sequence, then its riders; and the sums over them.
  std::vector<int32_t> withRiders(int sequence) const;
  Load load(int sequence) const;
  // Positions by falling length, equal ones by position.
  std::vector<int32_t> byLength() const;

 private:
  void findHost(int sequence);
  // Fewest ranks that hold these sequences as one micro-batch; above the cluster if none do.
  int minRanks(const std::vector<int32_t>& sequences) const;

  std::vector<int64_t> lengths_;
  std::vector<double> squares_;
  std::vector<int32_t> min_ranks_;
  std::vector<int32_t> host_;  // the sequence that each one rides on, or -1; empty: none does
  std::vector<int32_t> riders_;
  CostModel cost_;
};

// Whether each rank's share of a micro-batch fits into memory, with as much offload as hides behind
// its compute.
bool fits(const Problem& problem, const Load& load, const std::vector<int32_t>& sequences,
          int size);

// A time that no plan can beat, however it packs sequences and chooses group sizes.
double lowerBound(const Problem& problem);

// Makespans that the plans of these policies cannot beat, much quicker to find than the plans.
double leastStatic(const Problem& problem, const PolicyOptions& options);
double leastNaive(const Problem& problem);
double leastPow2(const Problem& problem);

Plan planStatic(const Problem& problem, const PolicyOptions& options);
Plan planNaive(const Problem& problem);
Plan planBalanced(const Problem& problem, const PolicyOptions& options, double lower_bound);
Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound);
Plan planPow2(const Problem& problem);

// The plan of a policy by its name, in which no rank has more ring peers than the cluster allows:
// if it would, of groups of neighbouring ranks. Raises InvalidUsage if these have more, too.
Plan planPolicy(const Problem& problem, const std::string& policy, const PolicyOptions& options,
                double lower_bound);

// Improves a plan of few micro-batches by local search; never makes it longer.
Plan refine(const Problem& problem, Plan plan, double lower_bound);

// Swaps what micro-batches run so that ranks end together; never makes the plan longer. The
// plan is one without a pipeline.
Plan swapSequences(const Problem& problem, Plan plan);

// --- shared by the policies ----------------------------------------------------------------------

Scope scopeOf(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept;

// Speed of the slowest of these ranks.
double slowest(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept;

// What the ranks of a micro-batch run: the sums over its sequences, and the tokens that each holds.
struct Work {
  Load load;
  int64_t held = 0;
};
Work workOf(const Problem& problem, const MicroBatch& batch) noexcept;

// Sets predicted_s and offload from the sequences and the ranks.
void price(const Problem& problem, MicroBatch& batch);

// Packs sequences into bins of at most `capacity` tokens, each into the fullest one with room.
// `sequences` are positions in `lengths`, by falling length.
std::vector<std::vector<int32_t>> packBestFit(const std::vector<int64_t>& lengths,
                                              const std::vector<int32_t>& sequences,
                                              int64_t capacity);

// Sorts by start (equal ones stay in place), prices, and finds the makespan, with a pipeline that
// of the simulated schedule.
Plan finishPlan(const Problem& problem, std::vector<MicroBatch> batches);

}  // namespace hdpcomm::planner
