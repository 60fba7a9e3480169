// The ranks of a cluster in the order of their speeds, and how many of them in a row a sequence
// takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"

namespace hdpcomm::planner {

// A place is a position in that order.
class RanksBySpeed {
 public:
  RanksBySpeed(const CostModel& cost, int ranks) : cost_(cost), by_speed_(ranks) {
    const Cluster& cluster = cost.cluster();
    std::iota(by_speed_.begin(), by_speed_.end(), 0);
    std::stable_sort(by_speed_.begin(), by_speed_.end(),
                     [&](int a, int b) { return cluster.speed(a) > cluster.speed(b); });
    for (const int rank : by_speed_) speeds_.push_back(cluster.speed(rank));
  }

  int count() const { return static_cast<int>(by_speed_.size()); }
  double speed(int place) const { return speeds_[place]; }
  int32_t rank(int place) const { return by_speed_[place]; }
  // Whether all ranks have one speed.
  bool alike() const { return cost_.cluster().speeds.empty(); }

  // The sum of the speeds from a place on.
  double speedFrom(int first) const {
    return std::accumulate(speeds_.begin() + first, speeds_.end(), 0.0);
  }

  // Fewest ranks from place `first` to `last` on which the job ends within the height; 0: there are
  // none.
  int sizeWithin(const Job& job, int first, int last, double height) const {
    const int left = last - first;
    if (alike()) return sizeOfAlike(job, left, height);
    int size = cost_.sizeWithin(job.load, job.min_size, left, height * speeds_[first]);
    while (size > 0 &&
           speeds_[first + size - 1] < speeds_[first]) {  // at the speed of the last one
      const int more = cost_.sizeWithin(job.load, size, left, height * speeds_[first + size - 1]);
      if (more == size) break;
      size = more;
    }
    return size;
  }

  // The fastest number of ranks from place `first` to `last`.
  int fastestSize(const Job& job, int first, int last) const {
    const auto seconds = [&](int size) {
      return cost_.seconds(job.load, size) / speeds_[first + size - 1];
    };
    int best = std::min(cost_.fastestSize(job.load, job.min_size), last - first);
    const auto borders = cost_.cluster().largestGroups();
    for (const int border : {borders[1], borders[0]}) {
      if (best > border && job.min_size <= border && seconds(border) < seconds(best)) best = border;
    }
    for (int size = best - 1; size >= job.min_size && !alike(); --size) {
      if (seconds(size) < seconds(best)) best = size;
    }
    return best;
  }

  // The ranks of these by_speed, by rising number.
  std::vector<int32_t> ranks(int first, int count) const {
    std::vector<int32_t> ranks(by_speed_.begin() + first, by_speed_.begin() + first + count);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

 private:
  struct LastSize {
    double tokens = 0, squares = 0, height = 0;
    int least = 0;
    int size = 0;
  };

  // sizeWithin() where all ranks are alike. Sequences of one length that follow each other get
  // equal sizes.
  int sizeOfAlike(const Job& job, int left, double height) const {
    if (job.load.tokens != last_size_.tokens || job.load.squares != last_size_.squares ||
        height != last_size_.height || job.min_size != last_size_.least) {
      const int size = cost_.sizeWithin(job.load, job.min_size, count(), height);
      last_size_ = {job.load.tokens, job.load.squares, height, job.min_size, size};
    }
    return last_size_.size <= left ? last_size_.size : 0;
  }

  const CostModel& cost_;
  std::vector<int32_t> by_speed_;
  std::vector<double> speeds_;  // of these
  mutable LastSize last_size_;  // of sizeWithin()
};

}  // namespace hdpcomm::planner
