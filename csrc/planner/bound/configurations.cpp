#include "planner/bound/configurations.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "planner/bound/class_sizes.hpp"
#include "planner/bound/covering_program.hpp"
#include "planner/bound/way_lists.hpp"

namespace hdpcomm::planner {
namespace {

class Configurations {
 public:
  // `share`: of the longest sequence's length, from which on sequences are taken one by one.
  Configurations(const Problem& problem, double share)
      : forward_(problem.cost().params().forward),
        ranks_(problem.ranks()),
        stages_(problem.cost().cluster().pipeline),
        sizes_(problem, share) {}

  double count() const { return sizes_.count(); }  // of the long sequences

  // The largest time, from `low` on, that is proved to be too short; `low` if none is.
  double improve(double low, const std::function<ConfigurationCharges(double)>& charges) {
    if (stages_ == 1 && (ranks_ < 2 || count() < 2)) return low;
    const auto tooShort = [&](double time) {
      const ConfigurationCharges found = charges(time);
      return !sizes_.find(time, found) || (prepare(time, found.idle) && prove());
    };
    const double least = stages_ > 1 ? 2 * kLeastGain : kLeastGain;
    if (low <= 0 || !tooShort(low * (1 + least))) return low;
    low *= 1 + least;
    double high = low * kMostGain;
    double step = low * kFirstGain;
    while (high - low > least * low) {
      const double middle = std::min(low + step, 0.5 * (low + high));
      (tooShort(middle) ? low : high) = middle;
      step *= 2;
    }
    return low;
  }

 private:
  static constexpr double kLeastShare = 0.3;  // of the work, for the long sequences to matter
  static constexpr int kCells = 4096;         // of the time
  static constexpr int kMaxSideBySide = 24;
  static constexpr int kMaxRanks = 512;  // the same, of the ranks
  static constexpr double kMaxStack = 40;
  static constexpr double kLeastGain = 5e-4;
  static constexpr double kFirstGain = 2e-3;
  static constexpr double kMostGain = 1.5;
  static constexpr int kMaxSteps = 150;
  static constexpr double kNoList = 10;  // times the ranks: cost of what is in no list by itself
  static constexpr size_t kMaxKnots = 14;
  static constexpr size_t kMaxKnotsAlone = 24;

  // What is counted of a micro-batch: on each of its ranks, or its work as a part of a chain of
  // micro-batches that follow each other, of which there are only as many as run side by side.
  struct Weights {
    double chained = 0;          // 0: on each rank; else the share of the work, below 1
    std::vector<double> prices;  // of the knots; then of the others
  };

  // A class whose price is free; those of classes between two knots lie on a line.
  struct Knot {
    size_t at = 0;
    double demand = 0;
  };

  // The last knot up to a class, and the share of the next one in its price.
  struct Place {
    size_t knot = 0;
    double share = 0;
  };

  // The best micro-batch that takes so many cells of the time.
  struct Found {
    double gain = 0;
    size_t in_class = 0;
    size_t size = 0;
  };

  // Prepares the lists of these. False if there is nothing to be gained.
  bool prepare(double time, double idle) {
    time_ = time;
    idle_ = idle;
    others_work_ = sizes_.othersWork();
    double work = 0;
    for (const auto& each : sizes_.classes()) work += each.work * each.count;
    placeKnots();
    placeWays();
    const ClassSizes::Class& shortest = sizes_.classes().back();
    double longest = 0;  // micro-batch on the fewest ranks
    for (const auto& sizes : shortest.sizes) {
      if (sizes.first == shortest.sizes.front().first) longest = std::max(longest, sizes.seconds);
    }
    return work >= kLeastShare * (work + others_work_) && longest * kMaxStack >= time_;
  }

  // Knots at both ends of each range of classes with the same least size, and between them.
  void placeKnots() {
    const std::vector<ClassSizes::Class>& classes = sizes_.classes();
    const auto least = [&](size_t at) { return classes[at].sizes.front().first; };
    size_t ranges = 1;
    for (size_t i = 1; i < classes.size(); ++i) ranges += least(i) != least(i - 1);
    const size_t most = listsEndWithItems() ? kMaxKnotsAlone : kMaxKnots;
    const bool cut = 3 * ranges <= most;
    const size_t stride = std::max<size_t>(1, classes.size() / (most - 2 * ranges * cut));
    knots_.clear();
    for (size_t i = 0; i < classes.size(); ++i) {
      const bool first = i == 0 || (cut && least(i) != least(i - 1));
      const bool last = i + 1 == classes.size() || (cut && least(i) != least(i + 1));
      if (first || last || i - knots_.back().at >= stride) knots_.push_back({i, 0});
    }
    places_.clear();
    size_t knot = 0;
    for (size_t i = 0; i < classes.size(); ++i) {
      while (knot + 1 < knots_.size() && knots_[knot + 1].at <= i) ++knot;
      const size_t at = knots_[knot].at;
      const double share =
          i == at ? 0 : static_cast<double>(i - at) / static_cast<double>(knots_[knot + 1].at - at);
      places_.push_back({knot, share});
      knots_[knot].demand += classes[i].count * (1 - share);
      if (share > 0) knots_[knot + 1].demand += classes[i].count * share;
    }
  }

  // Leaves out what takes more ranks than another one that is no longer and has no longer way.
  void placeWays() {
    if (stages_ == 1) return;
    std::vector<WayLists::Item> items;
    for (size_t i = 0; i < sizes_.classes().size(); ++i) {
      const std::vector<ClassSizes::Sizes>& sizes = sizes_.classes()[i].sizes;
      const size_t begin = items.size();
      for (size_t k = 0; k < sizes.size(); ++k) {
        const WayLists::Item own{sizes[k].seconds, sizes[k].ends, i, k};
        const bool worse =
            sizes[k].together == 1 &&
            std::any_of(items.begin() + static_cast<std::ptrdiff_t>(begin), items.end(),
                        [&](const WayLists::Item& item) { return item.noLongerThan(own); });
        if (!worse) items.push_back(own);
      }
    }
    lists_.place(std::move(items),
                 {time_, idle_, forward_, sizes_.othersHeld(), sizes_.hasOthers()});
  }

  // Whether some weights prove the time to be too short, best those that proved the last one.
  bool prove() {
    if (proof_.prices.size() == numPrices(proof_) && excessOf(proof_) > 1 + 1e-9) return true;
    const bool few = stages_ == 1 && chains() <= kMaxSideBySide && ranks_ <= kMaxRanks;
    for (const double chained : {0.0, 0.5, 0.3, 0.7}) {
      if (chained > 0 && !few) break;
      Weights weights;
      weights.chained = chained;
      if (!find(weights)) continue;
      proof_ = std::move(weights);
      return true;
    }
    return false;
  }

  size_t numPrices(const Weights& weights) const {
    return knots_.size() + (weights.chained == 0 && sizes_.hasOthers());
  }

  // Whether a rank of a pipeline begins and ends with one of the long sequences: all are.
  bool listsEndWithItems() const { return stages_ > 1 && !sizes_.hasOthers(); }

  // How many micro-batches with a long sequence can run at a time.
  int chains() const { return ranks_ / sizes_.classes().back().sizes.front().first; }

  // The rank-seconds that are left to the long sequences.
  double roomForWork() const { return ranks_ * time_ - others_work_; }

  // The least cost of the lists of micro-batches that a rank, or a chain, can run one after the
  // other within the time, so that all sequences are run: above the ranks, or above 1, the time is
  // too short. Its prices are the weights.
  bool find(Weights& weights) {
    const bool chained = weights.chained > 0;
    if (chained && roomForWork() <= 0) return false;
    std::vector<double> costs;
    for (const Knot& knot : knots_) {
      double least = kNoList * ranks_;
      for (const auto& sizes : sizes_.classes()[knot.at].sizes) {
        const double often = std::floor((time_ - sizes.ends.only) / sizes.seconds);
        if (often < 1) continue;
        const double cost = chained ? costOf(weights, sizes, often) : sizes.first;
        least = std::min(least, cost / (often * sizes.together));
      }
      costs.push_back(least);
    }
    const bool others = sizes_.hasOthers() && !chained;
    std::vector<double> demands;
    for (const Knot& knot : knots_) demands.push_back(knot.demand);
    if (others) {
      demands.push_back(others_work_);
      costs.push_back(1 / (time_ - idle_));
    }
    CoveringProgram program(demands, costs);
    const int steps = listsEndWithItems() ? 4 * kMaxSteps : kMaxSteps;
    for (int step = 0; step < steps; ++step) {
      weights.prices = program.prices();
      if (weights.prices.empty()) return false;
      const double excess = excessOf(weights);
      if (excess > 1 + 1e-9) return true;
      if (excess <= 0) return false;  // some micro-batches take next to no time
      if (program.cost() <= (chained ? 1 : ranks_)) return false;
      if (!program.enter(bestList(weights))) return false;
    }
    return false;
  }

  // What `often` micro-batches of these sizes in a chain cost.
  double costOf(const Weights& weights, const ClassSizes::Sizes& sizes, double often) const {
    return (1 - weights.chained) / chains() +
           weights.chained * often * sizes.first * sizes.seconds / roomForWork();
  }

  // The weights of all sequences over what the ranks can run within the time; above 1: too short.
  double excessOf(const Weights& weights) {
    const bool chained = weights.chained > 0;
    double all = 0;
    for (size_t i = 0; i < knots_.size(); ++i) all += knots_[i].demand * weights.prices[i];
    if (!chained && sizes_.hasOthers()) all += others_work_ * weights.prices.back();
    const auto gain = [&](const WayLists::Item& item) {
      const ClassSizes::Sizes& sizes = sizesOf(item.in_class, item.size);
      return priceOf(item.in_class, weights) * sizes.together / sizes.first;
    };
    const double most = stages_ > 1 ? lists_.most(gain, fillOf(weights)) : fillTime(weights);
    return chained ? all / (chains() * most + weights.chained) : all / (ranks_ * most);
  }

  double fillOf(const Weights& weights) const {
    return weights.chained == 0 && sizes_.hasOthers() ? weights.prices.back() : 0;
  }

  // The most weight of a list of micro-batches of a rank, or of a chain, within the time; finds
  // most_ and kept_.
  double fillTime(const Weights& weights) {
    const double cell = time_ / kCells;
    best_.assign(kCells + 1, {});
    for (size_t i = 0; i < sizes_.classes().size(); ++i) {
      const double price = priceOf(i, weights);
      for (size_t k = 0; k < sizes_.classes()[i].sizes.size(); ++k) {
        const ClassSizes::Sizes& sizes = sizesOf(i, k);
        const auto cells = static_cast<int>(sizes.seconds / cell * (1 - 1e-9));
        if (cells == 0) return std::numeric_limits<double>::infinity();
        if (cells > kCells) continue;
        const double all = price * sizes.together;
        const double gain = weights.chained > 0 ? all - weights.chained * sizes.first *
                                                            sizes.seconds / roomForWork()
                                                : all / sizes.first;
        if (gain > best_[cells].gain) best_[cells] = {gain, i, k};
      }
    }
    const double fill = fillOf(weights);
    most_.resize(kCells + 1);
    for (int x = 0; x <= kCells; ++x) most_[x] = fill * cell * x;
    kept_.clear();
    for (int cells = 1; cells <= kCells; ++cells) {
      const double gain = best_[cells].gain;
      if (gain <= most_[cells]) continue;  // shorter ones in its place are worth no less
      kept_.push_back(cells);
      takeOften(cells, gain);
    }
    return most_[kCells];
  }

  // Puts a micro-batch into the lists as often as that helps.
  void takeOften(int cells, double gain) {
    for (int begin = cells; begin <= kCells; begin += cells) {
      const int end = std::min(begin + cells, kCells + 1);
      const double* const from = most_.data() + begin - cells;
      double* const to = most_.data() + begin;
      for (int x = 0; x < end - begin; ++x) to[x] = std::max(to[x], from[x] + gain);
    }
  }

  const ClassSizes::Sizes& sizesOf(size_t in_class, size_t size) const {
    return sizes_.classes()[in_class].sizes[size];
  }

  double priceOf(size_t in_class, const Weights& weights) const {
    const auto [knot, share] = places_[in_class];
    const double price = weights.prices[knot];
    return share > 0 ? price + share * (weights.prices[knot + 1] - price) : price;
  }

  void cover(CoveringProgram::Column& column, size_t in_class, size_t size, bool chained) const {
    const auto [knot, share] = places_[in_class];
    const ClassSizes::Sizes& sizes = sizesOf(in_class, size);
    const double covers = sizes.together / (chained ? 1.0 : sizes.first);
    column.covers[knot] += covers * (1 - share);
    if (share > 0) column.covers[knot + 1] += covers * share;
  }

  // The list that was found for these weights.
  CoveringProgram::Column bestList(const Weights& weights) {
    CoveringProgram::Column column{1, std::vector<double>(weights.prices.size(), 0.0)};
    if (stages_ > 1) {
      const WayLists::List list = lists_.best();
      for (const auto* item : list.items) cover(column, item->in_class, item->size, false);
      if (sizes_.hasOthers()) column.covers.back() = list.beside;
      return column;
    }
    const double cell = time_ / kCells;
    if (weights.chained > 0) column.cost = (1 - weights.chained) / chains();
    int x = kCells;
    for (size_t i = kept_.size(); i-- > 0;) {
      const Found& found = best_[kept_[i]];
      while (x >= kept_[i] && most_[x] <= (most_[x - kept_[i]] + found.gain) * (1 + 1e-13)) {
        x -= kept_[i];
        cover(column, found.in_class, found.size, weights.chained > 0);
        if (weights.chained > 0) {
          const ClassSizes::Sizes& sizes = sizesOf(found.in_class, found.size);
          column.cost += weights.chained * sizes.first * sizes.seconds / roomForWork();
        }
      }
    }
    if (weights.chained == 0 && sizes_.hasOthers()) column.covers.back() = cell * x;
    return column;
  }

  const double forward_;  // share of forward passes
  const int ranks_;
  const int stages_;
  ClassSizes sizes_;
  double others_work_ = 0;
  double time_ = 0;
  double idle_ = 0;
  WayLists lists_;
  Weights proof_;  // of the last time that was too short
  std::vector<Knot> knots_;
  std::vector<Place> places_;  // of classes
  std::vector<Found> best_;    // by cells
  std::vector<double> most_;   // weight, by cells
  std::vector<int> kept_;      // cells of what is in lists
};

}  // namespace

double raiseByConfigurations(const Problem& problem, double low,
                             const std::function<ConfigurationCharges(double)>& charges) {
  if (problem.cost().cluster().pipeline == 1) {
    return Configurations(problem, 0.5).improve(low, charges);
  }
  double before = 0;
  for (const double share : {0.5, 0.15}) {
    Configurations configurations(problem, share);
    if (configurations.count() > before) low = configurations.improve(low, charges);
    before = configurations.count();
  }
  return low;
}

}  // namespace hdpcomm::planner
