// Plans for ranks that are pipelines (PP-Balance of ByteScale, section 6.2), judged by the schedule
// that runs.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/bound/bound.hpp"
#include "planner/flat/balanced.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/pipeline/lanes.hpp"
#include "planner/pipeline/wave_planner.hpp"
#include "planner/pipeline/wave_shape.hpp"
#include "planner/search/search.hpp"
#include "planner/simulate/finish_plan.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// Random changes of the heights of waves, for the search for shorter plans of pipelines.
class HeightChanges {
 public:
  // A random number below 1.
  double unit() { return random_.unit(); }

  // Changes the heights that are given in a shape, at one place or at all.
  void apply(Shape& shape) {
    const bool reserves = shape.top > 0;
    const double part = kLeast + kSpan * random_.unit() * random_.unit();
    const bool more = random_.below(2) == 0;
    if (random_.below(8) == 0) {
      scale(shape.given.reserved, 1 + (more ? part : -part) / 3);
      scale(shape.given.others, 1 + (more ? part : -part) / 3);
    } else if (reserves && random_.below(8) == 0) {
      shape.top *= 1 + (more ? part : -part);
    } else {
      change(reserves && random_.below(3) == 0 ? shape.given.reserved : shape.given.others,
             shape.given.others, part);
    }
    for (std::vector<double>* heights : {&shape.given.reserved, &shape.given.others}) {
      std::sort(heights->begin(), heights->end(), std::greater<>());
    }
    if (random_.below(8) == 0) shape.spread = !shape.spread;
    if (random_.below(8) == 0) shape.full = more ? 0 : 0.5 + 0.5 * random_.unit();
  }

 private:
  static constexpr double kLeast = 0.01, kSpan = 0.14;  // of a height

  static void scale(std::vector<double>& heights, double factor) {
    for (double& height : heights) height *= factor;
  }

  // `others`: the same, or where a first height comes from.
  void change(std::vector<double>& heights, const std::vector<double>& others, double part) {
    if (heights.empty()) {
      heights.push_back(others[random_.below(others.size())]);
      return;
    }
    double& one = heights[random_.below(heights.size())];
    double& other = heights[random_.below(heights.size())];
    switch (random_.below(6)) {
      case 0:
        one *= 1 - part;
        break;
      case 1:
        one *= 1 + part;
        break;
      case 2:
        other += part * one;
        one -= part * one;
        break;
      case 3:
        split(heights, one);
        break;
      case 4:
        if (&one != &other) merge(heights, one, other);
        break;
      default:
        random_.below(2) == 0 ? add(heights, one) : drop(heights, one);
    }
  }

  // Two lower ones in the place of one: what runs on more ranks takes more work.
  void split(std::vector<double>& heights, double& one) {
    const double second = one * (0.45 + 0.3 * random_.unit());
    one *= 0.45 + 0.3 * random_.unit();
    heights.push_back(second);
  }

  void merge(std::vector<double>& heights, double& one, double& other) {
    other = (one + other) * (0.65 + 0.35 * random_.unit());
    erase(heights, one);
  }

  // One more, for which all are lower.
  void add(std::vector<double>& heights, double one) {
    const double added = one * (random_.below(2) == 0 ? 1 : random_.unit());
    scale(heights, 1 - shareOf(heights, added) * random_.unit());
    heights.push_back(added);
  }

  // One less, for which all others are higher.
  void drop(std::vector<double>& heights, double& one) {
    if (heights.size() < 2) return;
    const double dropped = one;
    erase(heights, one);
    scale(heights, 1 + shareOf(heights, dropped) * random_.unit());
  }

  // About the share of one height in all; the first one is the highest. All are 0 where the longest
  // sequences, on ranks of their own, are all that there is.
  static double shareOf(const std::vector<double>& heights, double one) {
    const double highest = std::max(one, heights.front());
    return highest > 0 ? one / (static_cast<double>(heights.size()) * highest) : 0;
  }

  static void erase(std::vector<double>& heights, double& one) {
    heights.erase(heights.begin() + (&one - heights.data()));
  }

  Xorshift random_;
};

// Larger clusters are searched on a sample of so many ranks or more, with this part of the work.
constexpr int kSampleRanks = 1 << 11;
constexpr double kSampleBudget = 0.25;

class ShapeSearch {
 public:
  ShapeSearch(const Problem& problem, double lower_bound)
      : problem_(problem),
        waves_(problem),
        stages_(problem.cost().cluster().pipeline),
        by_levels_(problem.cost().cluster().chunks == 1),
        bound_(lower_bound) {}

  // Tries all shapes, with this part of the usual work.
  void tryAllShapes(double budget);

  // Tries the best shapes of each kind that the search on a sample of the step has found, unless
  // their plans of it are clearly longer than `limit`, and improves the best one a little.
  void tryBestOf(const ShapeSearch& sample, double limit);

  // Empty where no shape has one.
  Plan plan() { return planOf(best_); }

  static constexpr double kVeryFar = 1.25;     // of the bound
  static constexpr double kSampled = 1.02;     // of a sample's best plan, for shapes that are tried
  static constexpr double kImproving = 0.125;  // of the usual work, after these
  static constexpr int kAllOwn = std::numeric_limits<int>::max();

  const char* trying = "";  // a candidate

  // What the candidates ask and do.
  int count() const { return count_; }  // of waves
  bool byLevels() const { return by_levels_; }
  bool found() const { return best_.some(); }
  bool above(double share) const { return best_.makespan >= share * bound_; }
  bool alike() const { return problem_.cost().cluster().speeds.empty(); }

  void attemptEqual() { attempt({count_, 0, 0}); }
  void attemptSlopes() { attempt({count_, stages_, stages_}); }

  void attemptRamps() {
    Shape shape{count_};
    shape.ramps = 1;
    shape.full = 0.85;
    for (const int later : {0, count_ / 4}) {
      shape.later = later;
      for (const bool spread : {false, true}) {
        shape.spread = spread;
        attempt(shape);
      }
      if (!by_levels_) return;  // each attempt is a whole simulation
    }
  }

  // Ranks for the longest sequences alone, `own` at most: as few as end near the bound.
  void reserveRanks(int own) {
    const bool few = own < kAllOwn;
    for (const double above : {1.0, 1.03, 1.07, 1.12}) {
      const double top = bound_ * above / stages_;
      if (stages_ * top >= best_.makespan) break;
      for (const int count : {few ? 8 : 4, few ? 16 : 14}) {
        for (const int beside : {few ? 2 : 0, few ? 5 : 4}) {
          Shape shape{count, stages_, stages_};
          shape.top = top;
          shape.beside = beside;
          shape.own = own;
          attempt(shape);
        }
      }
    }
  }

  // Changes one thing at a time, as long as that helps.
  void descend() {
    for (double before = 0; !done() && before != best_.makespan;) {
      before = best_.makespan;
      for (const int more : {-8, -4, -2, -1, 1, 2, 4, 8}) {
        change([&](Shape& shape) { shape.waves += more; });
      }
      for (const double slack : {0.01, 0.025, 0.06, 0.09}) {
        change([&](Shape& shape) { shape.slack = slack; });
      }
      if (!by_levels_) {  // each attempt is a whole simulation
        changeUp();
        break;
      }
      for (const double ramps : {0.0, 0.6, 0.8, 1.0, 1.2}) {
        change([&](Shape& shape) { shape.ramps = ramps; });
      }
      change([&](Shape& shape) { shape.spread = !shape.spread; });
      for (const double full : {0.0, 0.7, 0.85, 0.93}) {
        change([&](Shape& shape) { shape.full = full; });
      }
      if (best_.shape.top <= 0) continue;
      for (const double factor : {0.98, 0.99, 1.01, 1.02}) {
        change([&](Shape& shape) { shape.top *= factor; });
      }
      for (const int more : {-2, -1, 1, 2}) {
        change([&](Shape& shape) { shape.beside = std::max(0, shape.beside + more); });
      }
    }
  }

  bool nodesMatter() const {
    const CostModel& cost = problem_.cost();
    const Scope widest = cost.cluster().scope(0, problem_.ranks() - 1);
    return alike() && (cost.kv(widest) > cost.kv(Scope::kNode) ||
                       cost.latency(widest) > cost.latency(Scope::kNode));
  }

  // Waves in which sequences that fit into a node lie in one: equal ones, and ones that rise and
  // fall.
  void attemptNodes() {
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
  // first, too.
  void tune() {
    const Changing changing(*this);
    HeightChanges changes;
    const auto waves = static_cast<double>(best_.heights.others.size());
    const double size = problem_.count() + waves * problem_.ranks() + waves * waves * stages_;
    const int trials = static_cast<int>(std::clamp(kTuning / size, 20.0, 200.0));
    Shape current = best_.shape;
    current.given = best_.heights;
    double makespan = best_.makespan;
    double predicted = best_.predicted;
    for (int trial = 0, misses = 0; trial < trials && misses < kMostMisses; ++trial) {
      if (done()) return;
      Shape shape = current;
      changes.apply(shape);
      const double best = best_.makespan;
      const double left = 1 - static_cast<double>(trial) / trials;
      const double longest = makespan + kLonger * best * left * changes.unit();
      const double found = makespanOf(shape, kNear * predicted, longest);
      misses = found < best ? 0 : misses + 1;
      if (found >= longest) continue;
      current = shape;
      current.given = waves_.heights();
      makespan = found;
      predicted = waves_.predicted();
    }
  }

 private:
  // Whether the search ends: near the bound, or after so much work.
  bool done() const {
    if (best_.makespan <= bound_ * kGoodEnough) return true;
    return spent_ > budget_ && best_.makespan < kForever;
  }

  void attempt(const Shape& shape) { makespanOf(shape, kLikely * best_.predicted, best_.makespan); }

  // Makes the plan and keeps the best one. Infinity if it was not made, as that of waves for which
  // a pipeline takes more than `most`; not below `limit`, which is no less than the best one, as
  // soon as that is certain.
  double makespanOf(Shape shape, double most, double limit) {
    if (done() || shape.waves < 1 || shape.waves > PipelineRamps::kMost) return kForever;
    shape.up = std::min(shape.up, shape.waves / 3);
    shape.down = std::min(shape.down, shape.waves / 3);
    const Shape key = shape.withoutUnused();
    if (std::find(tried_.begin(), tried_.end(), key) != tried_.end()) return kForever;
    tried_.push_back(key);
    double* known = nullptr;
    bool dealt = false;
    if (waves_.arrange(shape, best_.makespan, most)) {
      known = &makespans_[waves_.arrangement()];
      dealt = *known < limit && waves_.deal();
    }
    spent_ += (dealt ? 1 : kUnplanned) * waves_.spent();
    if (!dealt) return known != nullptr && *known > 0 ? *known : kForever;
    const double makespan = *known = makespanOfDealt(limit);
    if (makespan >= best_.makespan) return makespan;
    best_ = {shape, waves_.heights(), makespan, waves_.predicted(),
             changing_ ? improvedBy(best_.made_by, trying) : trying};
    best_of_kind_[trying] = best_;
    return makespan;
  }

  // What the waves take that were dealt.
  double makespanOfDealt(double limit) {
    return by_levels_ ? makespanByLevels(problem_, waves_.passes(), limit)
                      : finishPlan(problem_, waves_.plan(), limit).makespan;
  }

  void changeUp() {
    for (const int up : {0, 1, 2 * stages_}) {
      change([&](Shape& shape) {
        shape.up = up;
        shape.down = std::min(up, stages_);
      });
    }
  }

  template <typename Change>
  void change(const Change& change) {
    Shape shape = best_.shape;
    change(shape);
    const Changing changing(*this);
    attempt(shape);
  }

  // While it lives, what is tried is the best shape with a change.
  struct Changing {
    explicit Changing(ShapeSearch& search) : search(search) { search.changing_ = true; }
    ~Changing() { search.changing_ = false; }
    Changing(const Changing&) = delete;
    Changing& operator=(const Changing&) = delete;
    ShapeSearch& search;
  };

  static constexpr double kGoodEnough = 1.001;  // of the bound
  static constexpr double kBudget = 2.5e8;      // in all trials; see WavePlanner::spent()
  static constexpr double kUnplanned = 0.2;     // of a trial, where its waves are no plan's
  static constexpr int kMostMisses = 100;       // trials in turn that bring nothing, and end it
  static constexpr double kTuning = 2e6;        // sequences and ranks of waves that are looked at
  static constexpr double kLikely = 1.05;       // of what a pipeline takes for the best heights
  static constexpr double kNear = 1.02;         // the same, for small changes of these
  static constexpr double kLonger = 0.01;  // of the best plan, by which one may be longer at first
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  // The plan of a shape: it is made in the end, and quicker than those of all shapes that are best
  // for a while.
  struct Found {
    Shape shape;
    Heights heights;  // of its waves
    double makespan = kForever;
    double predicted = kForever;  // what a pipeline takes for these
    std::string made_by;

    bool some() const { return !made_by.empty(); }
  };
  Plan planOf(const Found& found);

  const Problem& problem_;
  WavePlanner waves_;
  const int stages_;
  const bool by_levels_;
  const double bound_;
  Found best_;
  // By candidate: the last one that was best for a while.
  std::map<std::string, Found> best_of_kind_;
  double spent_ = 0;  // in all trials
  double budget_ = kBudget;
  int count_ = 0;             // of waves that are tried
  bool changing_ = false;     // the best shape
  std::vector<Shape> tried_;  // none is better than the best one
  // By WavePlanner::arrangement(): makespans, or what these are not below.
  std::map<uint64_t, double> makespans_;
};

using Shapes = Candidate<ShapeSearch>;
constexpr auto kAlways = [](const ShapeSearch&) { return true; };
constexpr auto kByLevels = [](const ShapeSearch& search) {
  return search.found() && search.byLevels();
};
constexpr auto kInNodes = [](const ShapeSearch& search) {
  return search.found() && search.byLevels() && search.nodesMatter();
};

// For several numbers of waves.
constexpr Shapes kNumbered[] = {
    {"equal waves", [](const ShapeSearch& search) { return search.count() <= 4; },
     [](ShapeSearch& search) { search.attemptEqual(); }},
    {"slopes", [](const ShapeSearch& search) { return search.count() > 2; },
     [](ShapeSearch& search) { search.attemptSlopes(); }},
    {"ramps", [](const ShapeSearch& search) { return search.count() > 2; },
     [](ShapeSearch& search) { search.attemptRamps(); }},
};

constexpr Shapes kChanges[] = {
    {"descent", [](const ShapeSearch& search) { return search.found(); },
     [](ShapeSearch& search) { search.descend(); }},
    {"tuning", kByLevels, [](ShapeSearch& search) { search.tune(); }},
};

constexpr Shapes kShapes[] = {
    {"nodes",
     [](const ShapeSearch& search) {
       return search.byLevels() && search.nodesMatter() && search.above(ShapeSearch::kVeryFar);
     },
     [](ShapeSearch& search) { search.attemptNodes(); }},
    {"reserved ranks", kAlways,
     [](ShapeSearch& search) { search.reserveRanks(ShapeSearch::kAllOwn); }},
    {"reserved for few", kAlways,
     [](ShapeSearch& search) {
       for (const int own : {1, 2, 3}) search.reserveRanks(own);
     }},
    {"descent", [](const ShapeSearch& search) { return search.found(); },
     [](ShapeSearch& search) { search.descend(); }},
    {"nodes", kInNodes, [](ShapeSearch& search) { search.attemptNodes(); }},
    {"tuning", kByLevels, [](ShapeSearch& search) { search.tune(); }},
};

Plan ShapeSearch::planOf(const Found& found) {
  Plan plan;
  plan.makespan = kForever;
  if (!found.some()) return plan;
  if (waves_.arrange(found.shape, kForever, kForever) && waves_.deal()) {
    plan = finishPlan(problem_, waves_.plan());
  }
  plan.made_by = found.made_by;
  return plan;
}

void ShapeSearch::tryAllShapes(double budget) {
  budget_ *= budget;
  for (const int count : {1, 2, 3, 4, 6, 8, 11, 14, 18, 24, 32}) {
    count_ = count;
    tryAll(kNumbered, *this);
  }
  tryAll(kShapes, *this);
}

void ShapeSearch::tryBestOf(const ShapeSearch& sample, double limit) {
  std::vector<const Found*> shapes;
  for (const auto& [unused, found] : sample.best_of_kind_) shapes.push_back(&found);
  std::sort(shapes.begin(), shapes.end(),
            [](const Found* a, const Found* b) { return a->makespan < b->makespan; });
  const int parts = problem_.ranks() / sample.problem_.ranks();
  double least = limit;
  for (const Found* found : shapes) {
    if (found->makespan > kSampled * least) continue;
    least = std::min(least, found->makespan);
    Shape shape = found->shape;
    shape.own = static_cast<int>(std::min<int64_t>(int64_t{shape.own} * parts, kAllOwn));
    trying = found->made_by.c_str();
    attempt(shape);
  }
  budget_ = spent_ + kImproving * kBudget;
  tryAll(kChanges, *this);
}

// Looks for the shape of waves (wave_planner.hpp) that gives the shortest plan: several numbers and
// shapes are tried, and the best ones are changed. The best plan, none of whose sequences runs in
// slices; empty, with an infinite makespan, where no shape has one. Large clusters are searched on
// a sample of the step, whose best shapes are tried on the whole, unless their plans of the sample
// are clearly longer than `limit`.
Plan findShape(const Problem& problem, double lower_bound, double limit) {
  constexpr double kClearly = 0.999;
  ShapeSearch search(problem, lower_bound);
  const auto sample = search.alike() ? sampleOf(problem, kSampleRanks) : std::nullopt;
  if (!sample) {
    search.tryAllShapes(1);
    return search.plan();
  }
  ShapeSearch sampled(*sample, lower_bound);
  sampled.tryAllShapes(kSampleBudget);
  search.tryBestOf(sampled, limit);
  Plan plan = search.plan();
  // Or copies of that of the sample where it is clearly shorter, and than `limit`.
  const Plan part = sampled.plan();
  const double before = plan.micro_batches.empty() ? limit : plan.makespan;
  if (part.micro_batches.empty() || part.makespan > kClearly * before) return plan;
  auto copies = copiesOf(problem, problem.ranks() / sample->ranks(), part);
  return copies && copies->makespan < before ? std::move(*copies) : plan;
}

constexpr double kRefineLimit = 1 << 10;  // sequences x ranks, for local search
// Larger clusters with slices are planned in parts of so many ranks; their bounds may be that far
// above that of all.
constexpr int kRanksOfPart[] = {1 << 8};
constexpr double kFair = 0.02;
constexpr double kFar = 1.05;  // of a part's plan, for one without slices that no whole one is near

constexpr int kLarge = 1 << 11;  // ranks from which on a small gap is worth no search in slices:
constexpr double kSmallGap = 0.02;

// The gap to the bound that is left as it is.
double nearBound(const Cluster& cluster) { return cluster.ranks >= kLarge ? kSmallGap : 0; }

constexpr Candidate<PlanSearch> kImprovements[] = {
    {"local search", [](const PlanSearch& search) { return search.small(kRefineLimit); },
     [](PlanSearch& search) {
       search.improve(
           [&](Plan plan) { return refine(search.problem, std::move(plan), search.lower_bound); });
     }},
};

constexpr Candidate<PlanSearch> kSliced[] = {
    {"lanes",
     [](const PlanSearch& search) {
       return search.cluster().mostSlices() > 1 && !search.within(nearBound(search.cluster()));
     },
     [](PlanSearch& search) {
       search.take(planLanes(search.problem, search.lower_bound, search.limit()));
     }},
};

// `unsliced`: set to the least makespan without slices where the problem was not planned in parts.
Plan planOf(const Problem& problem, const PolicyOptions& options, double lower_bound,
            double& unsliced) {
  const bool slices = problem.cost().cluster().mostSlices() > 1;
  const double whole = slices ? lowerBound(problem.inSlices(1)) : lower_bound;
  std::optional<Plan> copies;
  if (slices && problem.cost().cluster().speeds.empty()) {
    copies = planCopiedPart(
        problem, lower_bound, kFair, kRanksOfPart,
        [&](const Problem& part, double bound) { return planOf(part, options, bound, unsliced); });
    if (copies && (copies->makespan <= whole || unsliced >= kFar * copies->makespan)) {
      return std::move(*copies);
    }
  }
  const bool copied = copies.has_value();
  PlanSearch search{problem, options, whole};
  search.take(std::move(copies));
  search.take(findShape(problem, whole, search.limit()));
  tryBaselines(search);
  if (copied) return std::move(search).result();
  tryAll(kImprovements, search);
  unsliced = search.best->makespan;
  search.lower_bound = lower_bound;
  tryAll(kSliced, search);
  return std::move(search).result();
}

}  // namespace

Plan planPipeline(const Problem& problem, const PolicyOptions& options, double lower_bound) {
  if (problem.count() == 0) return finishPlan(problem, {});
  double unsliced = 0;
  return planOf(problem, options, lower_bound, unsliced);
}

}  // namespace hdpcomm::planner
