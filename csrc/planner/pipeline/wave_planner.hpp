// Plans for pipelines as lists of waves: in a wave every rank runs one micro-batch, and all of them
// take about the same time. Long sequences take as many ranks as that needs, short ones are packed
// up to it. The waves grow and shrink, so that the pipelines fill and drain with small
// micro-batches. The longest sequences may have ranks of their own, which run few other waves.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/plan.hpp"
#include "planner/model/problem.hpp"
#include "planner/pipeline/ranks_by_speed.hpp"
#include "planner/pipeline/wave_order.hpp"
#include "planner/pipeline/wave_packs.hpp"
#include "planner/pipeline/wave_shape.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {

class WavePlanner {
 public:
  explicit WavePlanner(const Problem& problem);

  // What a sequence of middle length takes on several numbers of ranks: few inside a node, and as
  // many as are left to each if some run side by side.
  std::vector<double> levels() const;

  // Those of the last plan.
  const Heights& heights() const { return heights_; }
  // Seconds of a pipeline that runs the waves of the last plan at their full heights.
  double predicted() const { return order_.seconds(); }

  // How much the last plan had to look at, in about the work for one pass of a micro-batch.
  double spent() const;

  // The waves of a shape, without their short sequences. False if the shape is not possible, or if
  // it takes more than `limit` seconds in any case, or if a pipeline takes more than `most` for
  // waves of such heights.
  bool arrange(const Shape& shape, double limit, double most);

  // Tells what arrange() found from what it found for other shapes: those of the same number have
  // the same plan.
  uint64_t arrangement() const { return arrangement_; }

  // Deals the short sequences to the packs of the waves that arrange() found. False if they take
  // more than what it was told.
  bool deal();

  // What was dealt, in the order that drains and fills a pipeline fastest: the micro-batches, or
  // their passes alone.
  std::vector<MicroBatch> plan() const;
  const LevelPasses& passes();

 private:
  // Adds the waves of a shape that do `work` together, and those that its long sequences need more.
  // False if that is not possible.
  bool addAll(const Shape& shape, double work, double limit);

  // Adds the waves of a shape that do `work` together. False if that is not possible.
  bool addRelative(const Shape& shape, double work, double limit);

  // The highest ones first, which get the longest sequences.
  void addGiven(const Heights& given);

  // For heights that are numbers even where a pass takes no time.
  static double forwardShare(const CostModel& cost);

  bool single(const Job& job, double height) const;

  bool hasWide();

  void markUnused();

  void markUsed(size_t job);

  // The first job from `job` on that is in no wave yet; the number of jobs if there is none.
  size_t unusedFrom(size_t job);

  // A wave of the longest sequences; reserves its ranks for it. Returns the work that it takes, in
  // seconds of a rank on the smallest sizes.
  double addTopWave(double height, int most);

  // The longest sequences that are left and need several ranks to end within the height, or more
  // than that: those that end in time nowhere make the wave higher.
  void addWave(double height, int first, int last);

  // Whether the job's group may come next without crossing a border of nodes for no need. If not,
  // another one is placed in what is left of the node, or that stays idle.
  bool endNode(Wave& wave, size_t job, int size);

  // On the next ranks.
  void place(Wave& wave, size_t job, int size) const;

  // Makes a wave lower by the ranks that its long sequences leave over.
  void spread(Wave& wave) const;

  // Whether a sequence ends within the unit on no number of these ranks.
  bool tooHigh(const Job& job, int first, int last) const;

  // Makes room for the short sequences, and finds the order of the waves. False if these take
  // longer than these limits.
  bool makeOrder(double limit, double most);

  // A number of the waves, which are in their order.
  uint64_t numberOfWaves() const;

  // Adds waves until there is room for the short sequences. Returns the seconds of it, less than
  // they need if these waves take longer than `limit`.
  double makeRoom(double limit);

  // Adds the micro-batches of a wave; `packs`: of its own.
  void take(const Wave& wave, std::vector<int32_t>* packs, std::vector<MicroBatch>& batches) const;
  void addPasses(const Wave& wave);

  static constexpr double kOfSequence = 30;  // passes, for which a sequence is as much work
  static constexpr int kMaxNode = 16;        // ranks of a node, for levels
  static constexpr int kMaxMisses = 64;
  static constexpr size_t kMaxSpread = 64;
  static constexpr double kHopeless = 1.05;  // of the limit, where waves as a whole take longer

  const Problem& problem_;
  const CostModel& cost_;
  const RanksBySpeed by_speed_;
  std::vector<Job> jobs_;      // by falling length
  std::vector<size_t> other_;  // by job: the first one behind it that is not as long
  const PipelineRamps ramps_;
  double work_ = 0;
  double unit_ = 0;
  double full_ = 0;
  bool spread_ = false;
  bool nodes_ = false;
  int reserved_ = 0;           // ranks, the first ones by place, for the longest sequences
  std::vector<bool> used_;     // by job: whether it is in a wave by itself
  std::vector<size_t> after_;  // by job: itself, or if used one behind it, of which none between is
  size_t first_single_ = 0;    // up to which jobs need more than the unit on one rank
  std::vector<Wave> waves_;
  Heights heights_;                          // of the waves
  double extra_ = 0;                         // of those that are added where these do not suffice
  std::optional<WavePacks> packs_;           // of the sequences that are in no wave by themselves
  std::vector<WavePacks::Lacking> lacking_;  // what these are to get
  double most_ = 0;                          // seconds of a pipeline
  uint64_t arrangement_ = 0;
  WaveOrder order_;
  LevelPasses passes_;
};

}  // namespace hdpcomm::planner
