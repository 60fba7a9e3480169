#include "planner/pipeline/ranks_by_speed.hpp"

#include <algorithm>
#include <numeric>

namespace hdpcomm::planner {

RanksBySpeed::RanksBySpeed(const CostModel& cost, int ranks) : cost_(cost), by_speed_(ranks) {
  const Cluster& cluster = cost.cluster();
  std::iota(by_speed_.begin(), by_speed_.end(), 0);
  std::stable_sort(by_speed_.begin(), by_speed_.end(),
                   [&](int a, int b) { return cluster.speed(a) > cluster.speed(b); });
  for (const int rank : by_speed_) speeds_.push_back(cluster.speed(rank));
}

double RanksBySpeed::speedFrom(int first) const {
  return std::accumulate(speeds_.begin() + first, speeds_.end(), 0.0);
}

int RanksBySpeed::sizeWithin(const Job& job, int first, int last, double height) const {
  const int left = last - first;
  if (alike()) return sizeOfAlike(job, left, height);
  int size = cost_.sizeWithin(job.load, job.min_size, left, height * speeds_[first]);
  while (size > 0 && speeds_[first + size - 1] < speeds_[first]) {  // at the speed of the last one
    const int more = cost_.sizeWithin(job.load, size, left, height * speeds_[first + size - 1]);
    if (more == size) break;
    size = more;
  }
  return size;
}

int RanksBySpeed::fastestSize(const Job& job, int first, int last) const {
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

std::vector<int32_t> RanksBySpeed::ranks(int first, int count) const {
  std::vector<int32_t> ranks(by_speed_.begin() + first, by_speed_.begin() + first + count);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

int RanksBySpeed::sizeOfAlike(const Job& job, int left, double height) const {
  if (job.load.tokens != last_size_.tokens || job.load.squares != last_size_.squares ||
      height != last_size_.height || job.min_size != last_size_.least) {
    const int size = cost_.sizeWithin(job.load, job.min_size, count(), height);
    last_size_ = {job.load.tokens, job.load.squares, height, job.min_size, size};
  }
  return last_size_.size <= left ? last_size_.size : 0;
}

}  // namespace hdpcomm::planner
