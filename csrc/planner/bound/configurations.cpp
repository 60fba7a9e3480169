#include "planner/bound/configurations.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "planner/bound/covering_program.hpp"
#include "planner/bound/pass_times.hpp"
#include "planner/bound/way_lists.hpp"

namespace hdpcomm::planner {
namespace {

class Configurations {
 public:
  // `share`: of the longest sequence's length, from which on sequences are taken one by one.
  Configurations(const Problem& problem, double share)
      : cost_(problem.cost()), ranks_(problem.ranks()), stages_(cost_.cluster().pipeline) {
    const std::vector<int64_t>& lengths = problem.lengths();
    const auto longest = *std::max_element(lengths.begin(), lengths.end());
    std::vector<Load> alike;
    for (int i = 0; i < problem.count(); ++i) {
      const Load load = problem.own(i);
      if (load.tokens >= share * static_cast<double>(longest)) {
        alike.push_back(load);
        continue;
      }
      if (others_.tokens == 0) shortest_other_ = load;
      if (load.tokens > longest_other_.tokens) longest_other_ = load;
      if (load.tokens < shortest_other_.tokens) shortest_other_ = load;
      others_ += load;
    }
    std::sort(alike.begin(), alike.end(),
              [](const Load& a, const Load& b) { return a.tokens > b.tokens; });
    shortest_ = alike.back();
    // Classes of about equal numbers, each with the shortest length of its own.
    const size_t most = stages_ == 1         ? kMaxClasses
                        : others_.tokens > 0 ? kMaxClasses / 2
                                             : 2 * kMaxClasses;
    const size_t size = (alike.size() + most - 1) / most;
    for (size_t begin = 0; begin < alike.size();) {
      size_t end = std::min(alike.size(), begin + size);
      while (end < alike.size() && alike[end].tokens == alike[end - 1].tokens) ++end;
      classes_.push_back({alike[end - 1], static_cast<double>(end - begin), {}, {}, 0});
      begin = end;
    }
    count_ = static_cast<double>(alike.size());
    equal_ = alike.front().tokens == alike.back().tokens;
  }

  double count() const { return count_; }  // of the long sequences

  // The largest time, from `low` on, that is proved to be too short; `low` if none is.
  double improve(double low, const std::function<ConfigurationCharges(double)>& charges) {
    if (stages_ == 1 && (ranks_ < 2 || count_ < 2)) return low;
    const auto tooShort = [&](double time) {
      const ConfigurationCharges found = charges(time);
      return !findSizes(time, found) || (prepare(found) && prove());
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
  static constexpr size_t kMaxClasses = 64;
  static constexpr double kLeastShare = 0.3;  // of the work, for the long sequences to matter
  static constexpr int kCells = 4096;         // of the time
  static constexpr int kMaxSideBySide = 24;
  static constexpr int kMaxRanks = 512;  // the same, of the ranks
  static constexpr double kMaxStack = 40;
  static constexpr int kMaxPackRanks = 16;  // of micro-batches with so many equal sequences,
  static constexpr int kMaxTogether = 128;  // which are listed one by one
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

  // From `first` to `last` ranks, at least so many seconds for so many sequences together.
  struct Sizes {
    int first = 1;
    int last = 1;
    double seconds = 0;
    int together = 1;
    WayLists::Ends ends = {};  // of a pipeline
  };

  struct Class {
    Load load;  // of its shortest sequence
    double count = 0;
    std::vector<Sizes> sizes;
    std::vector<PassTimes::Job> jobs;  // on all ranges of ranks, for rooms_
    double work = 0;                   // least rank-seconds
    size_t knot = 0;                   // the last one up to it
    double share = 0;                  // of the next knot in its price
  };

  // A class whose price is free; those of classes between two knots lie on a line.
  struct Knot {
    size_t at = 0;
    double demand = 0;
  };

  // The best micro-batch that takes so many cells of the time.
  struct Found {
    double gain = 0;
    size_t in_class = 0;
    size_t size = 0;
  };

  // Finds the sizes that each class may have. False if one has none within the time.
  bool findSizes(double time, const ConfigurationCharges& charges) {
    time_ = time;
    idle_ = charges.idle;
    const std::pair<double, double> rooms{charges.held, charges.sequence};
    for (Class& each : classes_) {
      if (rooms != rooms_) each.jobs.clear();
    }
    rooms_ = rooms;
    for (Class& each : classes_) {
      findSizes(each, time, charges);
      if (each.sizes.empty()) return false;
    }
    return true;
  }

  // Prepares the lists of these. False if there is nothing to be gained.
  bool prepare(const ConfigurationCharges& charges) {
    others_work_ = others_.tokens > 0 ? leastWork(others_, charges.held) : 0;
    double work = 0;
    for (const Class& each : classes_) work += each.work * each.count;
    placeKnots();
    placeWays(charges.held);
    const Class& shortest = classes_.back();
    double longest = 0;  // micro-batch on the fewest ranks
    for (const Sizes& sizes : shortest.sizes) {
      if (sizes.first == shortest.sizes.front().first) longest = std::max(longest, sizes.seconds);
    }
    return work >= kLeastShare * (work + others_work_) && longest * kMaxStack >= time_;
  }

  // Knots at both ends of each range of classes with the same least size, and between them.
  void placeKnots() {
    const auto least = [&](size_t at) { return classes_[at].sizes.front().first; };
    size_t ranges = 1;
    for (size_t i = 1; i < classes_.size(); ++i) ranges += least(i) != least(i - 1);
    const size_t most = listsEndWithItems() ? kMaxKnotsAlone : kMaxKnots;
    const bool cut = 3 * ranges <= most;
    const size_t stride = std::max<size_t>(1, classes_.size() / (most - 2 * ranges * cut));
    knots_.clear();
    for (size_t i = 0; i < classes_.size(); ++i) {
      const bool first = i == 0 || (cut && least(i) != least(i - 1));
      const bool last = i + 1 == classes_.size() || (cut && least(i) != least(i + 1));
      if (first || last || i - knots_.back().at >= stride) knots_.push_back({i, 0});
    }
    size_t knot = 0;
    for (size_t i = 0; i < classes_.size(); ++i) {
      while (knot + 1 < knots_.size() && knots_[knot + 1].at <= i) ++knot;
      Class& each = classes_[i];
      each.knot = knot;
      each.share = i == knots_[knot].at
                       ? 0
                       : static_cast<double>(i - knots_[knot].at) /
                             static_cast<double>(knots_[knot + 1].at - knots_[knot].at);
      knots_[knot].demand += each.count * (1 - each.share);
      if (each.share > 0) knots_[knot + 1].demand += each.count * each.share;
    }
  }

  double leastWork(const Load& load, double held) const {
    const CostParams& params = cost_.params();
    return params.attention * load.squares + (params.piece + params.linear) * load.tokens +
           params.fixed * load.tokens / held;
  }

  void findSizes(Class& each, double time, const ConfigurationCharges& charges) {
    each.sizes.clear();
    each.work = std::numeric_limits<double>::infinity();
    const double tokens = each.load.tokens;
    const auto least = static_cast<int>(std::ceil(tokens / charges.sequence * (1 - 1e-9)));
    const auto borders = cost_.cluster().largestGroups();
    size_t range = 0;
    for (int first = std::max(least, 1); first <= ranks_;) {
      int last = first + std::max(0, (first - std::max(64, 2 * least)) / 32);
      for (const int border : borders) {
        if (first <= border) last = std::min(last, border);
      }
      last = std::min(last, ranks_);
      double seconds = cost_.leastSeconds(each.load, first, last);
      const int most = mostTogether(each.load, first, last, charges.held);
      const auto add = [&](double taken, int together, const WayLists::Ends& ends) {
        if (taken + ends.only <= time) addSizes(each, {first, last, taken, together, ends});
      };
      if (stages_ > 1) {
        if (each.jobs.size() == range) {
          each.jobs.push_back(PassTimes::inSlices(cost_, each.load, first, last, charges.held));
        }
        const PassTimes::Job& job = each.jobs[range++];
        add(job.passes, 1, {job.first - job.passes, job.last - job.passes, job.only - job.passes});
      } else if (most > 0) {
        add(seconds, 1, {});
      }
      for (int together = 2; together <= most && seconds <= time; ++together) {
        const Load load{each.load.squares * together, tokens * together};
        seconds = cost_.seconds(load, first);
        add(seconds, together, waysOfWhole(load, first, last));
      }
      if (most == 0) {  // with others, whose work its waiting may hide
        Load load = each.load;
        if (!othersMayHide(load, first, last, charges.held)) load += shortest_;
        add(std::min(seconds, charges.work(each.load, first) / last), 1,
            waysOfWhole(load, first, last));
      }
      first = last + 1;
    }
  }

  // The ways of a micro-batch that holds all of this load, in one piece.
  WayLists::Ends waysOfWhole(const Load& load, int first, int last) const {
    if (stages_ == 1) return {};
    const CostParams& params = cost_.params();
    const double all =
        cost_.computeSeconds(load, last) + params.fixed + (first - 1) * params.ring_step;
    const auto way = [&](double share, bool backward) {
      const double keys = PassTimes::longest(cost_, load, first, last, backward);
      return (stages_ - 1) * std::max(share * all, keys);
    };
    const double down = way(params.forward, false);
    const double back = way(1 - params.forward, true);
    return {down, back, down + back};
  }

  // Leaves out what takes more ranks than another one that is no longer and has no longer way.
  void placeWays(double held) {
    if (stages_ == 1) return;
    std::vector<WayLists::Item> items;
    for (size_t i = 0; i < classes_.size(); ++i) {
      const std::vector<Sizes>& sizes = classes_[i].sizes;
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
    const double forward = cost_.params().forward;
    double most_hidden = 0;
    if (others_.tokens > 0) {  // the densest ones, in all that a device holds
      most_hidden = leastWork(longest_other_, held) / longest_other_.tokens * stages_ * held;
    }
    lists_.place(std::move(items), {time_, idle_, forward, most_hidden, others_.tokens > 0});
  }

  static void addSizes(Class& each, const Sizes& sizes) {
    each.sizes.push_back(sizes);
    each.work = std::min(each.work, sizes.first * sizes.seconds / sizes.together);
  }

  // How many of the long sequences a micro-batch can have for which its time is that of these
  // alone, and shorter ones add no less than their own work to it; 0 if that is not known.
  int mostTogether(const Load& load, int first, int last, double held) const {
    if (alone(load, first, last, held)) return 1;
    if (!equal_ || last > kMaxPackRanks || first != last) return 0;
    if (others_.tokens > 0 &&
        !(addsItsWork(shortest_other_, first, held) && addsItsWork(longest_other_, first, held))) {
      return 0;
    }
    const double most = std::floor(first * held / load.tokens * (1 + 1e-9));
    return most <= kMaxTogether ? static_cast<int>(most) : 0;
  }

  // Whether no other of the long sequences fits into its micro-batch, and a shorter one adds no
  // less than its own work to it.
  bool alone(const Load& load, int first, int last, double held) const {
    const double room = last * held - load.tokens;
    return room < shortest_.tokens * (1 - 1e-9) && !othersMayHide(load, first, last, held);
  }

  // Whether shorter sequences fit into its micro-batch and may add less than their own work to it.
  bool othersMayHide(const Load& load, int first, int last, double held) const {
    const double room = last * held - load.tokens;
    if (others_.tokens == 0 || room < shortest_other_.tokens * (1 - 1e-9)) return false;
    return first != last || !addsItsWork(shortest_other_, first, held) ||
           !addsItsWork(longest_other_, first, held);
  }

  bool addsItsWork(const Load& other, int size, double held) const {
    const CostParams& params = cost_.params();
    const double compute = params.attention * other.tokens / size + params.piece;
    const double transfer = cost_.kv(cost_.cluster().leastScope(size));
    double added = params.linear;
    const auto pass = [&](double compute_share, double transfer_share) {
      const double own = compute_share * compute;
      added += own + (size - 1) * std::min(own, transfer_share * transfer);
    };
    pass(params.forward, params.forward_transfer);
    pass(1 - params.forward, 1 - params.forward_transfer);
    return added * other.tokens >=
           leastWork({other.tokens * other.tokens, other.tokens}, held) * (1 - 1e-12);
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
    return knots_.size() + (weights.chained == 0 && others_.tokens > 0);
  }

  // Whether a rank of a pipeline begins and ends with one of the long sequences: all are.
  bool listsEndWithItems() const { return stages_ > 1 && others_.tokens == 0; }

  // How many micro-batches with a long sequence can run at a time.
  int chains() const { return ranks_ / classes_.back().sizes.front().first; }

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
      for (const Sizes& sizes : classes_[knot.at].sizes) {
        const double often = std::floor((time_ - sizes.ends.only) / sizes.seconds);
        if (often < 1) continue;
        const double cost = chained ? costOf(weights, sizes, often) : sizes.first;
        least = std::min(least, cost / (often * sizes.together));
      }
      costs.push_back(least);
    }
    const bool others = others_.tokens > 0 && !chained;
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
  double costOf(const Weights& weights, const Sizes& sizes, double often) const {
    return (1 - weights.chained) / chains() +
           weights.chained * often * sizes.first * sizes.seconds / roomForWork();
  }

  // The weights of all sequences over what the ranks can run within the time; above 1: too short.
  double excessOf(const Weights& weights) {
    const bool chained = weights.chained > 0;
    double all = 0;
    for (size_t i = 0; i < knots_.size(); ++i) all += knots_[i].demand * weights.prices[i];
    if (!chained && others_.tokens > 0) all += others_work_ * weights.prices.back();
    const auto gain = [&](const WayLists::Item& item) {
      const Class& each = classes_[item.in_class];
      return priceOf(each, weights) * each.sizes[item.size].together / each.sizes[item.size].first;
    };
    const double most = stages_ > 1 ? lists_.most(gain, fillOf(weights)) : fillTime(weights);
    return chained ? all / (chains() * most + weights.chained) : all / (ranks_ * most);
  }

  double fillOf(const Weights& weights) const {
    return weights.chained == 0 && others_.tokens > 0 ? weights.prices.back() : 0;
  }

  // The most weight of a list of micro-batches of a rank, or of a chain, within the time; finds
  // most_ and kept_.
  double fillTime(const Weights& weights) {
    const double cell = time_ / kCells;
    best_.assign(kCells + 1, {});
    for (size_t i = 0; i < classes_.size(); ++i) {
      const Class& each = classes_[i];
      const double price = priceOf(each, weights);
      for (size_t k = 0; k < each.sizes.size(); ++k) {
        const Sizes& sizes = each.sizes[k];
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

  static double priceOf(const Class& each, const Weights& weights) {
    const double price = weights.prices[each.knot];
    return each.share > 0
               ? price + each.share * (weights.prices[each.knot + 1] - weights.prices[each.knot])
               : price;
  }

  void cover(CoveringProgram::Column& column, size_t in_class, size_t size, bool chained) const {
    const Class& each = classes_[in_class];
    const Sizes& sizes = each.sizes[size];
    const double covers = sizes.together / (chained ? 1.0 : sizes.first);
    column.covers[each.knot] += covers * (1 - each.share);
    if (each.share > 0) column.covers[each.knot + 1] += covers * each.share;
  }

  // The list that was found for these weights.
  CoveringProgram::Column bestList(const Weights& weights) {
    CoveringProgram::Column column{1, std::vector<double>(weights.prices.size(), 0.0)};
    if (stages_ > 1) {
      const WayLists::List list = lists_.best();
      for (const auto* item : list.items) cover(column, item->in_class, item->size, false);
      if (others_.tokens > 0) column.covers.back() = list.beside;
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
          const Sizes& sizes = classes_[found.in_class].sizes[found.size];
          column.cost += weights.chained * sizes.first * sizes.seconds / roomForWork();
        }
      }
    }
    if (weights.chained == 0 && others_.tokens > 0) column.covers.back() = cell * x;
    return column;
  }

  const CostModel& cost_;
  const int ranks_;
  const int stages_;
  std::vector<Class> classes_;  // by falling length
  double count_ = 0;            // of the long sequences
  bool equal_ = false;          // these have one length
  Load shortest_;               // of these
  Load others_;                 // sums over the shorter ones
  Load longest_other_, shortest_other_;
  double others_work_ = 0;
  double time_ = 0;
  double idle_ = 0;
  std::pair<double, double> rooms_;  // tokens on a rank of a micro-batch, and of a sequence
  WayLists lists_;
  Weights proof_;  // of the last time that was too short
  std::vector<Knot> knots_;
  std::vector<Found> best_;   // by cells
  std::vector<double> most_;  // weight, by cells
  std::vector<int> kept_;     // cells of what is in lists
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
