// The plan of one step: micro-batches in one global order. Each rank runs its own in that order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Tokens [first, end) of the only sequence of a micro-batch, of a tree in depth-first order; end 0:
// the sequences are whole. The slices of a sequence follow each other on the same ranks: a forward
// pass uses what those before it have kept, and backward passes run from the last slice to the
// first. Without a pipeline each forward pass but the last slice's runs again before its backward
// pass, so that no activations are held meanwhile.
struct Slice {
  int64_t first = 0;
  int64_t end = 0;
  bool more = false;   // another one follows
  double squares = 0;  // Problem::squares() of these tokens

  bool some() const noexcept { return end > 0; }
};

struct MicroBatch {
  std::vector<int32_t> ranks;      // in ring order
  std::vector<int32_t> sequences;  // positions in the given lengths
  double offload = 0;              // ratio, 0 to 1
  double predicted_s = 0;
  Slice slice;
  double start = 0;  // while solving: the desired start, which sets the order
};

struct Plan {
  std::vector<MicroBatch> micro_batches;  // in the global order
  double makespan = 0;
  double idle_share = 0;  // of ranks x makespan
  std::string made_by;    // the candidate of a search, or the policy; not a part of what runs
};

// By micro-batch: the one that is the next slice of its sequence, or -1. Empty where none is a
// slice. Raises InvalidUsage where slices do not follow each other on the same ranks.
std::vector<int32_t> followingSlices(const Plan& plan);

// Which ranks are joined by micro-batches, directly or by others: by rank, the lowest of them.
std::vector<int32_t> joinedRanks(const Plan& plan, int ranks);

Scope scopeOf(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept;

// Speed of the slowest of these ranks.
double slowest(const std::vector<int32_t>& ranks, const Cluster& cluster) noexcept;

// What the ranks of a micro-batch run: the sums over its sequences, and the tokens that each holds.
struct Work {
  Load load;
  int64_t held = 0;
  int64_t kept = 0;  // tokens of slices before, whose keys and values go round the ring, too
};
Work workOf(const Problem& problem, const MicroBatch& batch) noexcept;

// Sets predicted_s and offload from the sequences and the ranks. `work`: of them, where it is
// known.
void price(const Problem& problem, MicroBatch& batch);
void price(const Problem& problem, MicroBatch& batch, const Work& work);

// Packs sequences into bins of at most `capacity` tokens, each into the fullest one with room.
// `sequences` are positions in `lengths`, by falling length.
std::vector<std::vector<int32_t>> packBestFit(const std::vector<int64_t>& lengths,
                                              const std::vector<int32_t>& sequences,
                                              int64_t capacity);

}  // namespace hdpcomm::planner
