// The lower bound; docs/bound.md has the proofs. A time T is impossible if some sequence ends
// within T on no number of ranks, if the rank-seconds of all sequences at their smallest possible
// sizes do not fit into the ranks, or if more long sequences have to follow each other than fit
// into T. The bound is the smallest T that passes all of these tests, and those of
// pipeline_configurations.cpp. With a pipeline of p stages each micro-batch passes all of them, and
// the last stage is idle while the first micro-batch comes and the last one goes; there the bound
// of the longest sequences alone may be higher, and counts. Ranks of different speeds count as that
// much of a rank.
#include "planner/bound/bound.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/pipeline_ramps.hpp"
#include "planner/model/slice_bounds.hpp"

namespace hdpcomm::planner {
namespace {

// A sequence that may have to take several ranks. That of a tree has no more squares than any
// longer item, so that all that is tested falls along the items; its true cost is not less.
struct Item {
  Load load;
  double tokens_before = 0;  // of all longer items
};

class Bound {
 public:
  // The costs are those of the stage that `stages` says. `put_off`: seconds a token of work that no
  // micro-batch waits for, beside these costs.
  Bound(const Problem& problem, const StagesInPasses& stages, double put_off, double max_offload)
      : problem_(problem),
        cost_(problem.cost()),
        params_(cost_.params()),
        memory_(cost_.memory()),
        stages_(stages),
        pipeline_(cost_.cluster().pipeline),
        slices_(cost_.cluster().mostSlices()),
        put_off_(put_off) {
    int64_t longest = 0;
    int64_t shortest = problem.lengths()[0];
    double squares = kForever;
    for (int i = 0; i < problem.count(); ++i) {
      const int64_t length = problem.lengths()[i];
      all_ += problem.own(i);
      longest = std::max(longest, length);
      shortest = std::min(shortest, length);
      squares = std::min(squares, problem.own(i).squares);
    }
    longest_.add(longest);
    shortest_ = {squares, static_cast<double>(shortest)};
    max_offload_ = max_offload;
    alone_ = std::max(1 + stages_.before / timesFirstSlice(), stages_.all / slices_);
    for (int high = 1; high < kMaxStack; ++high) {
      double places = 0;
      for (int rank = 0; rank < problem.ranks(); ++rank) {
        const double passes = cost_.cluster().speed(rank) * (high + 1);
        places += std::max(0.0, std::ceil(passes - 1e-9) - 1);
      }
      stack_[high] = places / problem.ranks();
    }
    for (int rank = 0; rank < problem.ranks(); ++rank) ranks_ += cost_.cluster().speed(rank);
    sortSpeeds();
    if (pipeline_ > 1)
      filling_ = stages_.before * passes(shortest_, mostOfSequence(mostHeld(kForever)));
    collectItems();
    const bool plain = cost_.cluster().chunks == 1 && speeds_.empty() && !cost_.cluster().split;
    if (stages_.between > 0 && slices_ == 1 && plain) {
      const double forward = params_.forward;
      const auto [least, most] = std::minmax(forward, params_.forward_transfer);
      ramps_.emplace(cost_, stages_, least, most, fastestTime(shortest_));
      compute_ramps_.emplace(cost_, stages_, forward, forward, leastCompute());
    }
  }

  double solve() const {
    double low = std::max(slowest_ * alone_, workAlone() / ranks_ + filling_);
    double high = low;
    while (!possible(high)) {
      low = high;
      high *= 1.25;
      if (!std::isfinite(high) || high <= 0) return low;
    }
    for (int i = 0; i < 40 && high - low > 1e-7 * high; ++i) {
      const double middle = 0.5 * (low + high);
      (possible(middle) ? high : low) = middle;
    }
    return ramps_ && !problem_.hasTrees() ? byPipelineConfigurations(low) : low;
  }

 private:
  double byPipelineConfigurations(double low) const {
    if (low <= 0) return low;  // nothing takes any time: there are no times to try
    return raiseByPipelineConfigurations(
        problem_, stages_, leastCompute(), low,
        [this](double time) { return mostHeld(time / stages_.all); });
  }

  // The most tokens that a rank can hold of a sequence: its slices are micro-batches, of which a
  // device holds as many as its memory is for.
  double mostOfSequence(double held) const {
    return held * std::min<double>(slices_, cost_.cluster().mostHeld());
  }

  // The most tokens that a rank can hold in a micro-batch that ends within `limit` seconds.
  double mostHeld(double limit) const {
    const auto capacity = static_cast<double>(memory_.capacity);
    if (max_offload_ <= 0) return capacity;
    const double copied = params_.forward * std::max(0.0, limit - params_.fixed) / memory_.copy;
    return std::min({capacity / (1 - max_offload_ * memory_.offloadable),
                     capacity + memory_.offloadable * copied, capacity + memory_.host_tokens});
  }

  // Fewest ranks that hold a sequence at `held` tokens each; above the cluster if none do.
  int leastRanks(const Load& load, double held) const {
    const double least = std::ceil(load.tokens / held * (1 - 1e-9));
    return static_cast<int>(std::min(least, problem_.ranks() + 1.0));
  }

  void sortSpeeds() {
    speeds_ = cost_.cluster().speeds;
    std::sort(speeds_.begin(), speeds_.end(), std::greater<>());
    speed_sums_.assign(1, 0.0);
    for (size_t i = 0; i < speeds_.size(); ++i) {
      speed_sums_.push_back(speed_sums_.back() + speeds_[i]);
      const bool last = i + 1 == speeds_.size() || speeds_[i + 1] < speeds_[i];
      if (last) class_ends_.push_back(static_cast<int>(i + 1));
    }
    mixed_.assign(speeds_.size() + 1, 0.0);
  }

  // Keeps the sequences that need several ranks, or that take longer on one rank than the least
  // possible step; the others never do.
  void collectItems() {
    slowest_ = slowestFastest();
    const double low = std::max(slowest_, (workAlone() / ranks_ + filling_) / alone_);
    std::vector<Load> loads;
    for (const int32_t i : problem_.byLength()) {
      const Load load = problem_.own(i);
      if (problem_.lengths()[i] > memory_.capacity || cost_.seconds(load, 1) > low / kMaxStack) {
        loads.push_back(load);
      }
    }
    if (problem_.hasTrees()) {
      std::sort(loads.begin(), loads.end(), [](const Load& a, const Load& b) {
        return a.tokens != b.tokens ? a.tokens > b.tokens : a.squares > b.squares;
      });
    }
    double tokens = 0;
    double squares = kForever;
    for (const Load& load : loads) {
      squares = std::min(squares, load.squares);
      items_.push_back({{squares, load.tokens}, tokens});
      tokens += load.tokens;
    }
  }

  // The fastest time of the longest sequence, or of the one with the most squares, which differ
  // only where there are trees. It grows with both, so without trees no sequence is slower.
  double slowestFastest() const {
    Load longest, widest;
    for (int i = 0; i < problem_.count(); ++i) {
      const Load load = problem_.own(i);
      if (load.tokens > longest.tokens) longest = load;
      if (load.squares > widest.squares) widest = load;
    }
    double slowest = 0;
    for (const Load& load : {longest, widest}) slowest = std::max(slowest, fastestTime(load));
    return slowest;
  }

  double fastestTime(const Load& load) const {
    const int least = leastRanks(load, mostOfSequence(mostHeld(kForever)));
    if (speeds_.empty()) return cost_.seconds(load, cost_.fastestSize(load, least));
    double fastest = kForever;  // on the fastest ranks of each number
    for (int size = least; size <= problem_.ranks(); ++size) {
      fastest = std::min(fastest, cost_.seconds(load, size) / speeds_[size - 1]);
    }
    return fastest;
  }

  // Least sum of the forward pass of one micro-batch and the backward pass of another one, each of
  // which has a sequence at least as long as this one, of which a rank holds at most `held` tokens.
  // With split backward passes the forward pass alone: on the way back, all devices may have
  // gradients of weights to compute.
  double passes(const Load& load, double held) const {
    const int least = leastRanks(load, held);
    const double back = cost_.cluster().split ? 0 : leastPass(load, least, true);
    return leastPass(load, least, false) + back;
  }

  // The least seconds of a sequence's forward or backward pass on any number of ranks from `least`
  // on: no micro-batch that holds it passes a stage in less. A pass is quasi-convex in the number
  // of ranks of each scope (claim 4).
  double leastPass(const Load& load, int least, bool backward) const {
    double found = kForever;
    int first = least;
    for (const int last : cost_.cluster().largestGroups()) {
      if (first > last) continue;
      int low = first, high = last;
      while (low < high) {
        const int middle = low + (high - low) / 2;
        const bool falls = pass(load, middle + 1, backward) < pass(load, middle, backward);
        falls ? low = middle + 1 : high = middle;
      }
      found = std::min(found, pass(load, low, backward));
      first = last + 1;
    }
    return found;
  }

  // Where the sequence may run in slices, that of the longest slice, or with several stages on a
  // device of the first one.
  double pass(const Load& load, int size, bool backward) const {
    if (slices_ > 1 && cost_.cluster().chunks == 1) return longestSlice(load, size, backward);
    const double compute = cost_.stepCompute(load, size);
    const double transfer = cost_.stepTransfer(load, size, cost_.cluster().leastScope(size));
    const double share = backward ? 1 - params_.forward : params_.forward;
    const double least = share * (params_.fixed + (size - 1) * params_.ring_step);
    const double wait =
        backward ? cost_.backwardWait(compute, transfer) : cost_.forwardWait(compute, transfer);
    const double whole = share * cost_.computeSeconds(load, size) + least + (size - 1) * wait;
    if (slices_ == 1) return whole;
    if (backward) return least;  // of whichever slice ends the step
    return std::max(least, (whole + (slices_ - 1) * least) / timesFirstSlice());
  }

  // The longest pass of a sequence in as many slices as it may have: it is no shorter than the
  // mean, and with the last one all keys go round.
  double longestSlice(const Load& load, int size, bool backward) const {
    const double share = backward ? 1 - params_.forward : params_.forward;
    const double sent = backward ? 1 - params_.forward_transfer : params_.forward_transfer;
    const double transfer = cost_.stepTransfer(load, size, cost_.cluster().leastScope(size));
    return std::max(share * cost_.computeSeconds(load, size) / slices_,
                    sent * (size - 1) * transfer) +
           share * (params_.fixed + (size - 1) * params_.ring_step);
  }

  // How many times as long as the slice that begins it a sequence takes, at most, if that alone is
  // what a rank waits for; with one stage on a device, as the longest one.
  double timesFirstSlice() const {
    if (pipeline_ == 1) return 1;
    return timesTheFirst(slices_, 1 + (cost_.cluster().chunks - 1.0) / (pipeline_ - 1));
  }

  // Least seconds of compute of any micro-batch.
  double leastCompute() const {
    double least = kForever;
    for (int size = leastRanks(shortest_, mostHeld(kForever)); size <= problem_.ranks(); ++size) {
      const double rest = params_.fixed + (size - 1) * params_.ring_step;
      least = std::min(least, cost_.computeSeconds(shortest_, size) + rest);
    }
    return least;
  }

  // Rank-seconds of all sequences on one rank each: no plan has less.
  double workAlone() const { return workAlone(mostHeld(kForever)); }
  double workAlone(double held) const { return workAlone(all_, held); }
  double workAlone(const Load& load, double held) const {
    return params_.attention * load.squares + (params_.piece + params_.linear) * load.tokens +
           params_.fixed * load.tokens / held;
  }

  // Smallest size in which the fastest ranks end within `limit` seconds; 0 if there is none.
  int sizeWithin(const Load& load, int least, double limit) const {
    int size = cost_.sizeWithin(load, least, problem_.ranks(), limit);
    while (size > 0 && !speeds_.empty()) {  // at the speed of the last one
      const double slower = limit * speeds_[size - 1];
      const int more = cost_.sizeWithin(load, size, problem_.ranks(), slower);
      if (more == size) break;
      size = more;
    }
    return size;
  }

  // Smallest size, from `least` on, in which a sequence in slices passes all stages within `time`;
  // 0 if there is none. Its seconds are quasi-convex in each range of sizes with one scope.
  int sizeInSlices(const Load& load, int least, double time) const {
    const auto alone = [&](int size) {
      if (cost_.cluster().chunks > 1) return aloneInChunks(load, size);
      return cost_.seconds(load, size) +
             stages_.before * (longestSlice(load, size, false) + longestSlice(load, size, true));
    };
    int first = least;
    for (const int border : cost_.cluster().largestGroups()) {
      const int last = std::min(border, problem_.ranks());
      if (first > last) continue;
      if (alone(first) <= time) return first;
      int low = first, high = last;
      while (low < high) {
        const int middle = low + (high - low) / 2;
        alone(middle + 1) < alone(middle) ? low = middle + 1 : high = middle;
      }
      if (alone(high) <= time) {
        low = first;
        while (high - low > 1) {
          const int middle = low + (high - low) / 2;
          (alone(middle) <= time ? high : low) = middle;
        }
        return high;
      }
      first = last + 1;
    }
    return 0;
  }

  // What one takes at least with several stages on a device: its passes with the way of its first
  // slice, or all stages one after the other for its longest slice, which is no shorter than the
  // mean and waits as long as the last one, with which all keys go round.
  double aloneInChunks(const Load& load, int size) const {
    const double seconds = cost_.seconds(load, size);
    const double least = params_.fixed + (size - 1) * params_.ring_step;
    const double all = seconds + (slices_ - 1) * least;
    const double first = std::max(least, all / timesFirstSlice());
    double longest = all / slices_;
    if (size > 1) {
      const double step = cost_.stepTransfer(load, size, cost_.cluster().leastScope(size));
      longest = std::max(longest, least + (size - 1) * step);
    }
    return std::max(seconds + stages_.before * first, stages_.all * longest);
  }

  // What a group of `size` ranks could do at their own speeds over what it does at that of its
  // slowest, at least, whichever ranks they are.
  double mixed(int size) const {
    if (speeds_.empty()) return 1;
    double& known = mixed_[size];
    if (known > 0) return known;
    known = kForever;
    // Several groups may have this slowest speed: take the one whose other ranks are slowest.
    for (const int end : class_ends_) {
      if (end < size) continue;
      const double sum = speed_sums_[end] - speed_sums_[end - size];
      known = std::min(known, sum / (size * speeds_[end - 1]));
    }
    return known;
  }

  // The smallest group size from which on every ring is bound by its transfers, in a pass with
  // these shares of compute and transfers; a size above the cluster if there is none. Compute per
  // byte grows with the sequence, so it is enough to test the longest sequence that fits.
  int firstTransferBound(double held, double compute, double transfer) const {
    const auto bound = [&](int size) {
      Load load;
      load.tokens = std::min(longest_.tokens, held * size);
      load.squares = load.tokens * load.tokens;
      const double bytes = kv(size) * load.tokens / size;
      return transfer * bytes >= compute * cost_.stepCompute(load, size);
    };
    int low = 2;
    int high = problem_.ranks() + 1;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (middle > problem_.ranks() || bound(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  double kv(int size) const { return cost_.kv(cost_.cluster().leastScope(size)); }
  double latency(int size) const { return cost_.latency(cost_.cluster().leastScope(size)); }

  // What is assumed of a plan that ends within a time T.
  struct Limits {
    double batch_s = 0;    // longest possible micro-batch
    double rank_s = 0;     // most seconds of micro-batches on one rank
    double held = 1;       // most tokens that a rank can hold in one micro-batch
    double sequence = 1;   // and of one sequence
    int forward_from = 0;  // rings of at least this size are bound by transfers
    int backward_from = 0;
  };

  Limits limitsOf(double time) const {
    Limits limits;
    limits.batch_s = time / alone_;
    limits.rank_s = time - filling_;
    limits.held = mostHeld(cost_.cluster().split ? kForever : limits.batch_s);
    limits.sequence = mostOfSequence(limits.held);
    limits.forward_from =
        firstTransferBound(limits.sequence, params_.forward, params_.forward_transfer);
    limits.backward_from =
        firstTransferBound(limits.sequence, 1 - params_.forward, 1 - params_.forward_transfer);
    return limits;
  }

  // Least rank-seconds of a sequence in a micro-batch on `size` ranks, alone or with others, beyond
  // those on one rank; never falls as the size grows. Costs per micro-batch are charged by the
  // sequence's share of its tokens.
  double workBeyondOne(const Load& load, int size, const Limits& limits) const {
    const double share = load.tokens / limits.held;
    const double compute = cost_.stepCompute(load, size);
    const double transfer = kv(size) * load.tokens + latency(size) * share;
    double work = (size - 1) * (params_.piece * load.tokens + params_.ring_step * share);
    const auto pass = [&](int from, double compute_share, double transfer_share) {
      // Bound by transfers: the first step computes, all others wait for their message.
      if (size >= from) {
        work += (size - 1) * (transfer_share * transfer - compute_share * size * compute);
      }
    };
    pass(limits.forward_from, params_.forward, params_.forward_transfer);
    pass(limits.backward_from, 1 - params_.forward, 1 - params_.forward_transfer);
    return work;
  }

  // Rank-seconds beside one micro-batch's fixed cost on each rank: a rank that works pays it at
  // least once.
  double roomBesideFixed(const Limits& limits) const {
    return std::max(0.0, limits.rank_s - params_.fixed) * ranks_ * (1 + 1e-9);
  }

  bool possible(double time) const {
    const Limits limits = limitsOf(time);
    if (slowest_ > limits.batch_s) return false;
    const double room = limits.rank_s * ranks_ - put_off_ * all_.tokens;
    double work = workAlone(limits.held);
    if (work > room) return false;
    double compute = work - params_.fixed * all_.tokens / limits.held;  // of that, per sequence
    double plain = compute;  // and of sequences on several ranks
    Load before;             // of the item before, which is as long as this one in many steps
    int size = 0;
    double beyond_one = 0;
    double more_compute = 0;
    double lost = 0;
    for (const Item& item : items_) {
      if (item.load != before) {
        before = item.load;
        const int least = leastRanks(item.load, limits.sequence);
        if (least > problem_.ranks()) return false;
        if (least == 1 && cost_.seconds(item.load, 1) <= limits.batch_s)
          break;  // and all shorter ones
        size = sizeWithin(item.load, least, limits.batch_s);
        if (size > 0 && slices_ > 1 && !cost_.cluster().split) {
          size = sizeInSlices(item.load, size, time);
        }
        if (size == 0) return false;
        beyond_one = workBeyondOne(item.load, size, limits);
        more_compute = (size - 1) * (params_.piece * item.load.tokens +
                                     params_.ring_step * item.load.tokens / limits.held);
        lost = mixed(size) - 1;
      }
      work += beyond_one;
      plain += beyond_one;
      compute += more_compute;
      if (lost > 0) {
        work += lost * (beyond_one + workAlone(item.load, limits.held));
      }
      if (work > room) return false;
    }
    if (!stacksFit(limits, time)) return false;
    if (ramps_) {
      const double fixed = params_.fixed * all_.tokens / limits.held;
      if (work - fixed > ramps_->mostWork(time) * ranks_ * (1 + 1e-9)) return false;
      if (compute > compute_ramps_->mostWork(time) * ranks_ * (1 + 1e-9)) return false;
    }
    // With ranks of different speeds the search begins too high by it, and plans get longer.
    return !speeds_.empty() || plain <= roomBesideFixed(limits) - put_off_ * all_.tokens;
  }

  // Sequences are slow if k + 1 of their micro-batches, one after the other, take longer than is
  // left beside the way of the first one to the last stage and that of the last one back: then a
  // rank has at most k, fewer if it is slow itself. Each micro-batch has a rank for each `held`
  // tokens.
  bool stacksFit(const Limits& limits, double time) const {
    const double all = items_.empty() ? 0 : items_.back().tokens_before + items_.back().load.tokens;
    size_t count = 0;
    for (int high = 1; high < kMaxStack; ++high) {
      const double places = stack_[high] * (limits.sequence * problem_.ranks());
      if (all <= places) break;
      // Both times fall with the length: the items that are too slow come first.
      size_t end = items_.size();
      while (count < end) {
        const size_t middle = count + (end - count) / 2;
        const Load& load = items_[middle].load;
        const int least = leastRanks(load, limits.sequence);
        const double fastest = cost_.seconds(load, cost_.fastestSize(load, least));
        const double before = stages_.before;
        const double way = before > 0 ? before * passes(load, limits.sequence) : 0;
        const bool slow = (high + 1) * fastest + way > time;
        slow ? count = middle + 1 : end = middle;
      }
      if (count == 0) continue;
      const Item& last = items_[count - 1];
      const double tokens = last.tokens_before + last.load.tokens;
      if (tokens > places * (1 + 1e-9)) return false;
    }
    return true;
  }

  static constexpr int kMaxStack = 16;
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  const Problem& problem_;
  const CostModel& cost_;
  const CostParams& params_;
  const MemoryParams& memory_;
  const StagesInPasses stages_;
  const int pipeline_;  // devices
  const int slices_;    // of a sequence, at most
  const double put_off_;
  Load all_, longest_, shortest_;
  std::vector<Item> items_;  // by falling length
  double max_offload_ = 0;
  double ranks_ = 0;                   // the sum of their speeds
  std::vector<double> speeds_;         // fastest first; empty: all are alike
  std::vector<double> speed_sums_;     // of the first ones
  std::vector<int> class_ends_;        // how many ranks have at least a speed
  mutable std::vector<double> mixed_;  // of mixed(), by size; 0: not known yet
  double stack_[kMaxStack] = {};       // how many follow each other on a rank, mean over the ranks
  double alone_ = 1;                   // what a sequence takes in a pipeline, in passes of a device
  double filling_ = 0;                 // idle time of a pipeline's last stage
  double slowest_ = 0;                 // fastest time of the longest sequence
  std::optional<PipelineRamps> ramps_;  // of all seconds, and of those of compute
  std::optional<PipelineRamps> compute_ramps_;
};

// The same sequences where no gradients of weights are computed.
Problem withoutWeights(const Problem& problem) {
  CostParams params = problem.cost().params();
  params.linear = std::max(0.0, params.linear - params.put_off);
  return problem.pricedBy(CostModel(params, problem.cost().memory(), problem.cost().cluster()));
}

double boundOf(const Problem& problem, const StagesInPasses& stages, double max_offload) {
  const double put_off = problem.cost().params().put_off;
  if (!problem.cost().cluster().split || put_off <= 0) {
    return Bound(problem, stages, 0.0, max_offload).solve();
  }
  return Bound(withoutWeights(problem), stages, put_off, max_offload).solve();
}

double boundOf(const Problem& problem) {
  const CostModel& cost = problem.cost();
  Load longest;  // offload's ratio grows with the length
  longest.add(*std::max_element(problem.lengths().begin(), problem.lengths().end()));
  const double max_offload = cost.maxOffload(longest);
  if (cost.cluster().stage_work.empty())
    return boundOf(problem, StagesInPasses(cost.cluster()), max_offload);
  double bound = 0;
  for (const CountedStages& each : countedStages(problem)) {
    const CostModel counted = cost.times(each.work);
    MemoryParams memory = counted.memory();
    if (memory.copy > 0) memory.copy = std::numeric_limits<double>::min();  // others hide them
    const CostModel priced(counted.params(), memory, counted.cluster());
    bound = std::max(bound, boundOf(problem.pricedBy(priced), each.stages, max_offload));
  }
  return bound;
}

}  // namespace

double lowerBound(const Problem& problem) {
  if (problem.count() == 0) return 0.0;
  double bound = boundOf(problem);
  if (problem.cost().cluster().pipeline == 1 || problem.hasTrees()) return bound;
  const std::vector<int32_t>& order = problem.byLength();
  for (const double share : {0.75, 0.5}) {
    const double least = share * static_cast<double>(problem.lengths()[order.front()]);
    const auto end = std::partition_point(order.begin(), order.end(), [&](int32_t sequence) {
      return static_cast<double>(problem.lengths()[sequence]) >= least;
    });
    if (end == order.end()) break;
    bound = std::max(bound, boundOf(problem.part({order.begin(), end}, problem.cost())));
  }
  return bound;
}

}  // namespace hdpcomm::planner
