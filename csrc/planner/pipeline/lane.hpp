// A part of a plan in slices: ranks that share no sequence with others.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

// Which ranks these are, and what they run.
struct LaneJobs {
  struct Shared {
    std::vector<int32_t> ranks;
    int32_t sequence;
  };
  std::vector<int32_t> ranks;               // rising
  std::vector<Shared> shared;               // by several ranks, in their order
  std::vector<std::vector<int32_t>> alone;  // by place of the rank: sequences
};

// How the micro-batches of a lane are cut and ordered.
struct LaneForm {
  double height = 0.02;  // of micro-batches, as a share of the bound
  double before = 0;     // share of what a rank runs by itself that comes before shared sequences
  double growth = 1;     // of slices (slice_bounds.hpp)
  double ends = 0.25;  // height of the first and the last run of a rank, as a share of the others'

  bool operator==(const LaneForm&) const = default;
};

// Makes micro-batches of a lane's jobs, and finds the form in which they end first. It has numbers
// of its own for ranks and sequences.
class Lane {
 public:
  Lane(const Problem& all, LaneJobs jobs);

  const LaneJobs& jobs() const { return jobs_; }
  // By the best form so far; infinite before settle(), and if memory holds none.
  double makespan() const { return makespan_; }

  // Tries two forms, or `all`: one choice after the other. `unit`: what heights are shares of.
  // Returns how many passes it looked at.
  double settle(double unit, bool all);
  bool settled() const { return settled_; }  // whether it has tried all

  // Adds the micro-batches of the best form, with the numbers that all ranks and sequences have.
  void addTo(std::vector<MicroBatch>& batches) const;

 private:
  // What runs without a break on the same ranks: a sequence, in slices or not, or a pack.
  struct Run {
    std::vector<int32_t> ranks;
    std::vector<int32_t> sequences;
    double seconds = 0;
    bool at_end = false;  // first or last on one of its ranks
  };

  static std::vector<int32_t> sequencesOf(const LaneJobs& jobs);

  // The first rank of the part: it begins with a node and with a domain.
  static int offsetOf(const Problem& all, const std::vector<int32_t>& ranks,
                      const std::vector<int32_t>& sequences);

  // Ranks of the part: as many as hold each sequence as a whole, at least.
  static int ranksOf(const Problem& all, const std::vector<int32_t>& ranks,
                     const std::vector<int32_t>& sequences, int offset);

  Problem part(const Problem& all) const;
  int32_t numberOf(int32_t sequence) const;
  Run runOf(std::vector<int32_t> ranks, std::vector<int32_t> sequences) const;
  Load loadOf(const Run& run) const;

  // Keeps the micro-batches of a form if they end earlier than those so far; 0 if it was tried.
  double attempt(const LaneForm& form, double unit);

  // The runs in their order, packs of at most this height.
  std::vector<Run> ordered(double height, double before) const;

  // What a rank runs by itself, in packs of at most this height, the shortest ones first.
  std::vector<Run> packs(size_t place, double height) const;

  void markEnds(std::vector<Run>& runs) const;

  // Adds the micro-batches of a run, in slices of this height. False where memory does not hold
  // them.
  bool cut(const Run& run, double height, double growth, std::vector<MicroBatch>& batches) const;

  LaneJobs jobs_;
  std::vector<int32_t> ids_;  // of all sequences, by own number
  int offset_;
  Problem problem_;
  std::vector<int32_t> ranks_;               // by place
  std::vector<Run> shared_;                  // in their order
  std::vector<std::vector<int32_t>> alone_;  // by place: sequences, by falling length
  std::vector<LaneForm> tried_;
  std::set<std::vector<int64_t>> plans_;  // of these: many forms have the same one
  LaneForm form_;                         // that ends first so far
  std::vector<MicroBatch> best_;
  double makespan_ = std::numeric_limits<double>::infinity();
  bool settled_ = false;
};

}  // namespace hdpcomm::planner
