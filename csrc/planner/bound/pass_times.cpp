#include "planner/bound/pass_times.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "planner/model/slice_bounds.hpp"

namespace hdpcomm::planner {
namespace {

constexpr int kParts = 3;  // of the range of the longest slice in which there are n or more

// What slices of a sequence take at least, on any of a range of numbers of ranks.
class Slices {
 public:
  Slices(const CostModel& cost, const Load& load, int first, int last)
      : params_(cost.params()),
        load_(load),
        work_(cost.computeSeconds(load, last)),
        most_work_(cost.computeSeconds(load, first)),
        each_(params_.fixed + (first - 1) * params_.ring_step),
        square_(params_.attention / last),
        linear_(params_.piece + params_.linear / last),
        near_((last - 1.0) / last),
        plain_(load.squares == load.tokens * load.tokens) {
    const Scope scope = cost.cluster().leastScope(first);
    token_ = (first - 1.0) / first * cost.kv(scope);
    message_ = (first - 1) * cost.latency(scope);
    hides_ = params_.attention * load.squares * (first - 1) / (1.0 * first * first) +
             params_.piece * load.tokens * near_;
  }

  double work() const { return work_; }
  double all() const { return load_.tokens; }

  // Passes of `count` slices or more, that end at these tokens or later, the last one first; none
  // has more than this share of the work.
  double passes(const std::vector<double>& ends, double most) const {
    return work_ + static_cast<double>(ends.size()) * each_ + waits(ends, most, false) +
           waits(ends, most, true);
  }

  // Where the last of slices end of which each has at most this share of the work, the last one
  // first.
  std::vector<double> ends(int count, double share) const {
    std::vector<double> found(count, 0.0);
    for (int i = 0; i < count; ++i) found[i] = i == 0 ? load_.tokens : end(1 - i * share);
    return found;
  }

  // The longest pass of slices, one of which has this share of the work.
  double longest(double share, bool backward) const {
    const double compute = backward ? 1 - params_.forward : params_.forward;
    const double sent = (backward ? 1 - params_.forward_transfer : params_.forward_transfer) *
                        (token_ * load_.tokens + message_);  // all keys, with the last slice
    if (share == 1) return compute * (work_ + each_) + std::max(0.0, sent - compute * hides_);
    return std::max(compute * share * work_, sent) + compute * each_;
  }

 private:
  // Tokens that take this share of the work.
  double end(double share) const {
    if (share <= 0 || !plain_) return 0;
    const double wanted = share * work_;
    const double below = linear_ + std::sqrt(linear_ * linear_ + 4 * square_ * wanted);
    return below > 0 ? 2 * wanted / below : 0;
  }

  double waits(const std::vector<double>& ends, double most, bool backward) const {
    const double compute = backward ? 1 - params_.forward : params_.forward;
    const double transfer = backward ? 1 - params_.forward_transfer : params_.forward_transfer;
    const double hidden = compute * near_ * most * most_work_;
    double one_by_one = 0;
    double all = -compute * hides_;
    for (const double each : ends) {
      const double sent = transfer * (token_ * each + message_);
      one_by_one += std::max(0.0, sent - hidden);
      all += sent;
    }
    return std::max(one_by_one, all);
  }

  const CostParams& params_;
  const Load load_;
  const double work_, most_work_;  // on the most and on the fewest ranks
  const double each_;              // what a slice costs beside its compute
  const double square_, linear_;
  const double near_;       // share of a ring's steps that wait for a message
  const bool plain_;        // each query sees all keys before it
  double token_, message_;  // to send a token round, and no token
  double hides_;            // compute beside messages, at most
};

constexpr double kForever = std::numeric_limits<double>::infinity();

}  // namespace

PassTimes::PassTimes(const CostModel& cost, const Load& load, int least, int ranks)
    : cost_(cost), load_(load), least_(least), borders_(cost.cluster().largestGroups()) {
  for (const bool backward : {false, true}) {
    int first = least;
    for (size_t i = 0; i < borders_.size(); ++i) {
      fastest_[backward][i] = fastest(first, std::min(borders_[i], ranks), backward);
      first = std::max(least, borders_[i] + 1);
    }
  }
}

double PassTimes::pass(int ranks, bool backward) const {
  double least = kForever;
  int first = least_;
  for (size_t i = 0; i < borders_.size(); ++i) {
    const int last = std::min(borders_[i], ranks);
    if (first <= last) {
      least = std::min(least, seconds(std::min(fastest_[backward][i], last), backward));
    }
    first = std::max(least_, borders_[i] + 1);
  }
  return least;
}

double PassTimes::longest(const CostModel& cost, const Load& load, int first, int last,
                          bool backward) {
  return Slices(cost, load, first, last).longest(1.0 / cost.cluster().mostSlices(), backward);
}

PassTimes::Job PassTimes::inSlices(const CostModel& cost, const Load& load, int first, int last,
                                   double held) {
  const Cluster& cluster = cost.cluster();
  const Slices slices(cost, load, first, last);
  const double whole = cost.leastSeconds(load, first, last);
  const double room = held * last;
  const auto fewest = std::max(1, static_cast<int>(std::ceil(load.tokens / room * (1 - 1e-9))));
  Job job{whole, kForever, kForever, kForever};
  if (fewest > 1) {
    std::vector<double> ends;
    for (int i = 0; i < fewest; ++i) ends.push_back(std::max(0.0, load.tokens - i * room));
    job.passes = std::max(whole, slices.passes(ends, 1));
  }
  const auto consider = [&](double passes, double share) {
    const double way = (cluster.pipeline - 1) * slices.longest(share, false);
    const double back = (cluster.pipeline - 1) * slices.longest(share, true);
    job.first = std::min(job.first, passes + way);
    job.last = std::min(job.last, passes + back);
    job.only = std::min(job.only, passes + way + back);
  };
  if (fewest == 1) consider(whole, 1);
  for (int count = 2; count <= cluster.mostSlices(); ++count) {
    // The longest slice has less than 1 / (count - 1) of the work.
    const double least = 1.0 / count;
    const double step = (1.0 / (count - 1) - least) / kParts;
    for (int part = 0; part < kParts; ++part) {
      const double most = least + (part + 1) * step;
      consider(std::max(job.passes, slices.passes(slices.ends(count, most), most)),
               least + part * step);
    }
  }
  return job;
}

PassTimes::Job PassTimes::leastInSlices(const CostModel& cost, const Load& load, int first,
                                        int last) {
  const Slices slices(cost, load, first, last);
  const double passes = cost.leastSeconds(load, first, last);
  const double share = 1.0 / cost.cluster().mostSlices();
  const auto along = [&](bool backward) {
    return (cost.cluster().pipeline - 1) *
           std::min(slices.longest(share, backward), slices.longest(1, backward));
  };
  const double way = along(false);
  const double back = along(true);
  return {passes, passes + way, passes + back, passes + way + back};
}

double PassTimes::timesFirstSlice(const Cluster& cluster) {
  if (cluster.pipeline == 1) return 1;
  return timesTheFirst(cluster.mostSlices(), 1 + (cluster.chunks - 1.0) / (cluster.pipeline - 1));
}

double PassTimes::seconds(int size, bool backward) const {
  const Cluster& cluster = cost_.cluster();
  const int slices = cluster.mostSlices();
  if (slices > 1 && cluster.chunks == 1) return longest(cost_, load_, size, size, backward);
  const CostParams& params = cost_.params();
  const double compute = cost_.stepCompute(load_, size);
  const double transfer = cost_.stepTransfer(load_, size, cluster.leastScope(size));
  const double rest = size * compute + params.linear * load_.tokens / size + params.fixed +
                      (size - 1) * params.ring_step;
  const double whole =
      backward ? (1 - params.forward) * rest + (size - 1) * cost_.backwardWait(compute, transfer)
               : params.forward * rest + (size - 1) * cost_.forwardWait(compute, transfer);
  if (slices == 1) return whole;
  const double share = backward ? 1 - params.forward : params.forward;
  const double least = share * (params.fixed + (size - 1) * params.ring_step);
  if (backward) return least;  // of whichever slice ends the step
  return std::max(least, (whole + (slices - 1) * least) / timesFirstSlice(cluster));
}

int PassTimes::fastest(int first, int last, bool backward) const {
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (seconds(middle + 1, backward) < seconds(middle, backward)) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first;
}

}  // namespace hdpcomm::planner
