// The ranks of a cluster in the order of their speeds, and how many of them in a row a sequence
// takes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/jobs.hpp"

namespace hdpcomm::planner {

// A place is a position in that order.
class RanksBySpeed {
 public:
  RanksBySpeed(const CostModel& cost, int ranks);

  int count() const { return static_cast<int>(by_speed_.size()); }
  double speed(int place) const { return speeds_[place]; }
  int32_t rank(int place) const { return by_speed_[place]; }
  // Whether all ranks have one speed.
  bool alike() const { return cost_.cluster().speeds.empty(); }

  // The sum of the speeds from a place on.
  double speedFrom(int first) const;

  // Fewest ranks from place `first` to `last` on which the job ends within the height; 0: there are
  // none.
  int sizeWithin(const Job& job, int first, int last, double height) const;

  // The fastest number of ranks from place `first` to `last`.
  int fastestSize(const Job& job, int first, int last) const;

  // The ranks of these by_speed, by rising number.
  std::vector<int32_t> ranks(int first, int count) const;

 private:
  struct LastSize {
    double tokens = 0, squares = 0, height = 0;
    int least = 0;
    int size = 0;
  };

  // sizeWithin() where all ranks are alike. Sequences of one length that follow each other get
  // equal sizes.
  int sizeOfAlike(const Job& job, int left, double height) const;

  const CostModel& cost_;
  std::vector<int32_t> by_speed_;
  std::vector<double> speeds_;  // of these
  mutable LastSize last_size_;  // of sizeWithin()
};

}  // namespace hdpcomm::planner
