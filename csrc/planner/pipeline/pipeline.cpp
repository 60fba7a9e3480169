// Plans for ranks that are pipelines (PP-Balance of ByteScale, section 6.2), judged by the schedule
// that runs. A step is a list of waves (wave_planner.hpp), of which several numbers and shapes are
// tried.
#include "planner/pipeline/pipeline.hpp"

#include <algorithm>
#include <limits>

#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/pipeline/height_changes.hpp"
#include "planner/pipeline/wave_planner.hpp"
#include "planner/pipeline/wave_shape.hpp"
#include "planner/pipeline/zone_shapes.hpp"
#include "planner/search/refine.hpp"
#include "planner/simulate/finish_plan.hpp"
#include "planner/simulate/level_order.hpp"

namespace hdpcomm::planner {
namespace {

constexpr double kStageRefineLimit = 1 << 10;  // sequences x ranks, for local search

// Looks for the shape of waves that gives the shortest plan.
class ShapeSearch {
 public:
  ShapeSearch(const Problem& problem, double lower_bound)
      : problem_(problem),
        waves_(problem),
        stages_(problem.cost().cluster().pipeline),
        by_levels_(problem.cost().cluster().chunks == 1),
        bound_(lower_bound) {}

  Plan run() {
    best_.makespan = kForever;
    for (const int count : {1, 2, 3, 4, 6, 8, 11, 14, 18, 24, 32}) {
      if (count <= 4) attempt({count, 0, 0});
      if (count > 2) attempt({count, stages_, stages_});
      if (count > 2) attemptRamps(count);
    }
    if (by_levels_ && best_.makespan > kVeryFar * bound_) attemptNodes();
    reserveRanks();
    if (best_.micro_batches.empty()) return std::move(best_);  // no shape has a plan
    descend();
    if (by_levels_) {
      attemptLevels();
      tune(kMostMisses);
      attemptZones();
    }
    return finishPlan(problem_, std::move(best_.micro_batches));
  }

 private:
  // Whether the search ends: near the bound, or after so much work.
  bool done() const {
    if (best_.makespan <= bound_ * kGoodEnough) return true;
    return spent_ > kBudget && best_.makespan < kForever;
  }

  void attemptRamps(int count) {
    Shape shape{count};
    shape.ramps = 1;
    shape.full = 0.85;
    for (const int later : {0, count / 4}) {
      shape.later = later;
      for (const bool spread : {false, true}) {
        shape.spread = spread;
        attempt(shape);
      }
      if (!by_levels_) return;  // each attempt is a whole simulation
    }
  }

  void attempt(const Shape& shape) { makespanOf(shape, kLikely * predicted_); }

  // Makes the plan and keeps the best one. Infinity if it was not made, as that of waves for which
  // a pipeline takes more than `most`.
  double makespanOf(Shape shape, double most) {
    if (done() || shape.waves < 1 || shape.waves > PipelineRamps::kMost) return kForever;
    shape.up = std::min(shape.up, shape.waves / 3);
    shape.down = std::min(shape.down, shape.waves / 3);
    const Shape key = shape.withoutUnused();
    if (std::find(tried_.begin(), tried_.end(), key) != tried_.end()) return kForever;
    tried_.push_back(key);
    Plan found;
    found.micro_batches = waves_.plan(shape, best_.makespan, most);
    spent_ += waves_.spent();
    if (found.micro_batches.empty()) return kForever;
    if (by_levels_) {
      for (MicroBatch& batch : found.micro_batches) price(problem_, batch);
      found.makespan = makespanByLevels(problem_, found);
    } else {
      found = finishPlan(problem_, std::move(found.micro_batches));
    }
    const double makespan = found.makespan;
    if (makespan >= best_.makespan) return makespan;
    best_ = std::move(found);
    shape_ = shape;
    heights_ = waves_.heights();
    predicted_ = waves_.predicted();
    return makespan;
  }

  // Ranks for the longest sequences alone: as few as end near the bound, or those of several of
  // them side by side.
  void reserveRanks() {
    std::vector<double> tops;
    for (const double above : {1.0, 1.03, 1.07, 1.12}) tops.push_back(bound_ * above / stages_);
    for (const int count : {1, 2, 3, 4, 6, 8}) {
      const double top = waves_.timeTogether(count);
      if (top <= 0) break;
      tops.push_back(top);
    }
    for (const double top : tops) {
      if (stages_ * top >= best_.makespan) continue;
      for (const int count : {4, 14}) {
        for (const int beside : {0, 4}) {
          Shape shape{count, stages_, stages_};
          shape.top = top;
          shape.beside = beside;
          attempt(shape);
        }
      }
    }
    // Ranks of their own for the longest sequence alone, or for the two or three longest.
    for (const int own : {1, 2, 3}) {
      for (const double above : {1.0, 1.05, 1.12}) {
        const double top = bound_ * above / stages_;
        if (stages_ * top >= best_.makespan) break;
        for (const int count : {8, 16}) {
          for (const int beside : {2, 5}) {
            Shape shape{count, stages_, stages_};
            shape.top = top;
            shape.beside = beside;
            shape.own = own;
            attempt(shape);
          }
        }
      }
    }
  }

  // Changes one thing at a time, as long as that helps.
  void descend() {
    for (double before = 0; !done() && before != best_.makespan;) {
      before = best_.makespan;
      for (const int more : {-8, -4, -2, -1, 1, 2, 4, 8}) {
        attempt(changed([&](Shape& shape) { shape.waves += more; }));
      }
      for (const double slack : {0.01, 0.025, 0.06, 0.09}) {
        attempt(changed([&](Shape& shape) { shape.slack = slack; }));
      }
      if (!by_levels_) {  // each attempt is a whole simulation
        changeUp();
        break;
      }
      shape_.ramps > 0 ? changeRamps() : changeSlopes();
      for (const double ramps : {0.0, 0.6, 0.8, 1.0, 1.2}) {
        attempt(changed([&](Shape& shape) { shape.ramps = ramps; }));
      }
      attempt(changed([&](Shape& shape) { shape.spread = !shape.spread; }));
      for (const double full : {0.0, 0.7, 0.85, 0.93}) {
        attempt(changed([&](Shape& shape) { shape.full = full; }));
      }
      if (shape_.top <= 0) continue;
      for (const double factor : {0.98, 0.99, 1.01, 1.02}) {
        attempt(changed([&](Shape& shape) { shape.top *= factor; }));
      }
      for (const int more : {-2, -1, 1, 2}) {
        attempt(changed([&](Shape& shape) { shape.beside = std::max(0, shape.beside + more); }));
      }
    }
  }

  // As many equal waves as are needed, of heights in which sequences of middle length end on
  // several numbers of ranks: few of them fit into a node.
  void attemptLevels() {
    for (const double height : waves_.levels()) {
      Shape shape;
      shape.given.others = {height};
      attempt(shape);
    }
    attemptNodes();
    if (nodesMatter()) attempt(changed([&](Shape& shape) { shape.nodes = !shape.nodes; }));
  }

  bool nodesMatter() const {
    const CostModel& cost = problem_.cost();
    const Scope widest = cost.cluster().scope(0, problem_.ranks() - 1);
    return cost.cluster().speeds.empty() && (cost.kv(widest) > cost.kv(Scope::kNode) ||
                                             cost.latency(widest) > cost.latency(Scope::kNode));
  }

  // Waves in which sequences that fit into a node lie in one: equal ones, and ones that rise and
  // fall.
  void attemptNodes() {
    if (!nodesMatter()) return;
    for (const double height : waves_.levels()) {
      Shape shape;
      shape.given.others = {height};
      shape.nodes = true;
      attempt(shape);
    }
    for (const int count : {8, 12, 16, 20, 26}) {
      Shape shape{count, stages_, stages_};
      shape.nodes = true;
      attempt(shape);
      shape.growth = 1.2;
      attempt(shape);
      shape.growth = 1.5;
      shape.up = shape.down = 0;
      shape.ramps = 1;
      attempt(shape);
    }
  }

  // Changes the heights of the waves at random. What makes the plan a little longer is kept at
  // first, too. `most_misses`: trials that bring nothing, one after the other, after which it ends.
  void tune(int most_misses) {
    HeightChanges changes;
    const auto waves = static_cast<double>(heights_.others.size());
    const double size = problem_.count() + waves * problem_.ranks() + waves * waves * stages_;
    const int trials = static_cast<int>(std::clamp(kTuning / size, 20.0, 200.0));
    Shape current = shape_;
    current.given = heights_;
    double makespan = best_.makespan;
    double predicted = predicted_;
    for (int trial = 0, misses = 0; trial < trials && misses < most_misses; ++trial) {
      if (done()) return;
      Shape shape = current;
      changes.apply(shape);
      const double best = best_.makespan;
      const double found = makespanOf(shape, kNear * predicted);
      misses = found < best ? 0 : misses + 1;
      const double left = 1 - static_cast<double>(trial) / trials;
      if (found >= makespan + kLonger * best * left * changes.unit()) continue;
      current = shape;
      current.given = waves_.heights();
      makespan = found;
      predicted = waves_.predicted();
    }
  }

  // Where all that leaves the plan far from the bound: the longest sequences one after the other.
  void attemptZones() {
    const CostModel& cost = problem_.cost();
    if (best_.makespan < kFar * bound_ || !cost.cluster().speeds.empty()) return;
    const double before = best_.makespan;
    const double share = std::clamp(cost.params().forward, 0.05, 0.95);
    const double work = waves_.meanWork() * problem_.ranks();
    for (const Shape& shape : zoneShapes(problem_, work, share, before)) {
      makespanOf(shape, kForever);
    }
    if (best_.makespan < before) tune(kMostMisses / 2);
  }

  void changeUp() {
    for (const int up : {0, 1, 2 * stages_}) {
      attempt(changed([&](Shape& shape) {
        shape.up = up;
        shape.down = std::min(up, stages_);
      }));
    }
  }

  // Few waves of long sequences: lower ones take more ranks, so the ramps are to be less steep.
  void changeSlopes() {
    changeUp();
    for (const double growth : {1.1, 1.2, 1.3, 1.5}) {
      attempt(changed([&](Shape& shape) { shape.growth = growth; }));
    }
    for (const double last : {0.45, 0.6, 0.75, 0.9}) {
      attempt(changed([&](Shape& shape) { shape.last = last; }));
    }
  }

  // A wave more or less on one side of the highest one, or on each.
  void changeRamps() {
    for (const int more : {-3, -2, -1, 1, 2, 3}) {
      attempt(changed([&](Shape& shape) { shape.later += more; }));
      attempt(changed([&](Shape& shape) {
        shape.later += more;
        shape.waves += more;
      }));
    }
  }

  template <typename Change>
  Shape changed(const Change& change) const {
    Shape shape = shape_;
    change(shape);
    return shape;
  }

  static constexpr double kGoodEnough = 1.001;  // of the bound
  static constexpr double kFar = 1.06;          // the same
  static constexpr double kVeryFar = 1.25;      // the same
  static constexpr double kBudget = 2.5e8;      // in all trials; see WavePlanner::spent()
  static constexpr double kTuning = 2e6;        // sequences and ranks of waves that are looked at
  static constexpr double kLikely = 1.05;       // of what a pipeline takes for the best heights
  static constexpr double kNear = 1.02;         // the same, for small changes of these
  static constexpr double kLonger = 0.01;  // of the best plan, by which one may be longer at first
  static constexpr int kMostMisses = 100;
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const Problem& problem_;
  WavePlanner waves_;
  const int stages_;
  const bool by_levels_;
  const double bound_;
  Plan best_;
  Shape shape_;                  // of the best plan
  Heights heights_;              // of its waves
  double spent_ = 0;             // in all trials
  double predicted_ = kForever;  // what a pipeline takes for these
  std::vector<Shape> tried_;     // none is better than the best plan
};

}  // namespace

Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  if (problem.count() == 0) return finishPlan(problem, {});
  Plan best = ShapeSearch(problem, lower_bound).run();
  const auto take = [&](Plan other) {
    if (other.makespan < best.makespan) best = std::move(other);
  };
  // Never worse than another policy. Most of these plans need not be made to know that, unless
  // split backward passes make them end earlier than is known of whole ones.
  const bool split = problem.cost().cluster().split;
  const auto beats = [&](double least) { return split || least < best.makespan; };
  if (beats(leastNaive(problem))) take(planNaive(problem));
  if (beats(leastPow2(problem))) take(planPow2(problem));
  if (beats(leastStatic(problem, options))) take(planStatic(problem, options));
  const bool small = static_cast<double>(problem.count()) * problem.ranks() <= kStageRefineLimit;
  if (small) take(refine(problem, best, lower_bound));
  return best;
}

}  // namespace hdpcomm::planner
