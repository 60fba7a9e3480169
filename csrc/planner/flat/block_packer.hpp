// Packs the sequences of a step into blocks of ranks, for one target time; balanced.cpp tries
// several targets.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner/flat/block_list.hpp"
#include "planner/flat/packing.hpp"
#include "planner/flat/short_filler.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/problem.hpp"

namespace hdpcomm::planner {

class BlockPacker {
 public:
  // The jobs are all there, in their order.
  BlockPacker(const Problem& problem, std::vector<Job>& jobs)
      : problem_(problem), cost_(problem.cost()), jobs_(jobs), filler_(cost_, jobs) {}

  // Places all jobs and returns the makespan. With
  // `fill`, a job that would take more than half of its block takes all of it: jobs that are too
  // wide to run side by side then follow each other without a gap.
  // A run that cannot end before `limit` is given up: it returns a time that is not below it.
  double run(double target, bool fill, double limit = std::numeric_limits<double>::infinity());

  // Whether `fill` mattered in the last run. If not, that run is the same one with and without.
  bool couldFill() const { return could_fill_; }

  // Blocks that all runs have looked at, to join some of them.
  int64_t looked() const { return looked_; }

  // The result of the last run, which this takes away; the next run uses the memory of `packing`.
  void take(Packing& packing) {
    std::swap(packing.placements, placements_);
    packing.short_jobs = filler_.take();
  }

 private:
  static constexpr int kMaxProbes = 400;  // blocks tried for one job; fewer with more ranks:
  static constexpr int kProbedRanks = 1 << 14;
  static constexpr size_t kSummarised = 16;
  static constexpr double kShortShare = 0.2;  // of the target time, up to which a job is short
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  // What no gap of some has more of.
  struct GapSummary {
    int count = 0;    // ranks
    double room = 0;  // seconds at full speed
  };

  static double roomOf(const Gap& gap) noexcept { return (gap.until - gap.start) * gap.speed; }

  double speed(int rank) const noexcept { return cost_.cluster().speed(rank); }

  // One block for all neighbouring ranks of equal speed, free from the start.
  void makeBlocks();

  // Sets the ranks on which the job is fastest, and the time on these.
  void findFastest(Job& job);

  // The fewest ranks, up to those on which the job is fastest, on which it takes so long at most; 0
  // if there are none.
  int fewestRanks(const Job& job, double seconds);

  void addGap(const Gap& gap);

  // Says of the gaps around this one how wide and long they are.
  void summarise(size_t gap);

  // Places the job into the shortest gap that it fits into, if there is one.
  bool placeInGap(size_t index);

  // Places the job so that it ends before the target: into the block that becomes free last among
  // those where its minimum size suffices, else into the one where the fewest ranks suffice.
  bool placeInBlock(size_t index);

  // First rank of a group in a block: inside one node if it fits into one, else inside one domain,
  // else the block's start.
  int position(const Block& block, int size) const;

  // Places the job into block `at`, unless it would end after the target.
  bool placeAt(size_t index, BlockList::Iterator at, int size);

  // No block has room: joins the blocks that become free first, as many as minimise idle time plus
  // additional work plus time beyond the target; of all of them, or of those that are fast enough.
  // Returns when the job ends.
  double placeAnywhere(size_t index);

  // The blocks of at least a speed that a job would take, from the one that is free first on.
  struct JoinedBlocks {
    double score = std::numeric_limits<double>::infinity();
    double least_speed = 0;
    size_t blocks = 0;
    int size = 0;
    double slowest = 1;  // of all blocks that were looked at
  };

  // None, with this score, where all have one that is not below `score_limit`.
  JoinedBlocks bestJoin(size_t index, double least_speed, double score_limit);

  // A least speed that is worth a try, and how many ranks have it.
  struct SpeedLimit {
    double speed;
    int ranks;
  };
  const std::vector<SpeedLimit>& speedLimits();

  double join(size_t index, const JoinedBlocks& joined);

  // placeAnywhere() for groups of neighbouring ranks: of all windows over them that begin or end
  // where a block does, in steps of a fifth of their size, the one with the best score.
  double joinNeighbours(size_t index);

  // Ranks that a job would take, and when.
  struct Window {
    double score = kNever;
    double start = 0;
    double end = 0;
    int first = 0;
    int size = 0;
    bool operator<(const Window& other) const { return score < other.score; }
  };

  // The window from rank `first` on, which lies in block `from`; none if there are too few ranks.
  Window windowAt(const Job& job, const std::vector<Block>& blocks, size_t from, int first,
                  int size) const;

  void insert(Block block);

  // A part of the block that is free at the same time takes its place.
  void replace(const Block& block, BlockList::Iterator at, Block part);

  // Returns the place of the next block of all.
  BlockList::Iterator erase(Block block, BlockList::Iterator at);

  // Place in by_speed_ of blocks of this speed.
  size_t speedClass(double speed) const;

  // Blocks of at least a speed, of speedLimits(), in the order of all blocks.
  class FastBlocks {
   public:
    FastBlocks(const BlockPacker& packer, double least_speed);

    // False after the last one.
    bool next();
    const Block& block() const { return *block_; }

   private:
    struct Part {
      const BlockList* list;
      const Block* first;        // the next one
      BlockList::Iterator next;  // its place
    };
    void add(const BlockList& list);

    std::array<Part, Cluster::kMostSpeedLimits> parts_;
    size_t count_ = 0;
    size_t at_ = 0;  // of the block
    const Block* block_ = nullptr;
  };

  const Problem& problem_;
  const CostModel& cost_;
  std::vector<Job>& jobs_;
  ShortFiller filler_;
  double target_ = 0;
  bool fill_ = false;
  bool could_fill_ = false;
  BlockList blocks_;
  // Where speeds differ: the same blocks by speed, those between two of the least speeds.
  std::vector<BlockList> by_speed_;
  uint32_t inserted_ = 0;
  int64_t looked_ = 0;
  std::vector<Placement> placements_;
  std::vector<Gap> gaps_;
  std::vector<GapSummary> gap_summaries_;  // of kSummarised gaps each
  // What fewestRanks() and findFastest() found last: sequences as long as the one before are
  // common.
  struct Fewest {
    double seconds = -1;
    Load load;
    int min_size = 0;
    int ranks = 0;
  };
  Fewest fewest_;
  Job last_fastest_;
  std::vector<Block> used_, members_;  // of join()
  std::vector<SpeedLimit> speed_limits_;
};

}  // namespace hdpcomm::planner
