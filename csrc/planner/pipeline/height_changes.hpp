// Random changes of the heights of waves, for the search for shorter plans of pipelines.
#pragma once

#include <vector>

#include "base/xorshift.hpp"
#include "planner/pipeline/wave_shape.hpp"

namespace hdpcomm::planner {

class HeightChanges {
 public:
  // A random number below 1.
  double unit() { return random_.unit(); }

  // Changes the heights that are given in a shape, at one place or at all.
  void apply(Shape& shape);

 private:
  static constexpr double kLeast = 0.01, kSpan = 0.14;  // of a height

  static void scale(std::vector<double>& heights, double factor);

  // `others`: the same, or where a first height comes from.
  void change(std::vector<double>& heights, const std::vector<double>& others, double part);

  // Two lower ones in the place of one: what runs on more ranks takes more work.
  void split(std::vector<double>& heights, double& one);

  void merge(std::vector<double>& heights, double& one, double& other);

  // One more, for which all are lower.
  void add(std::vector<double>& heights, double one);

  // One less, for which all others are higher.
  void drop(std::vector<double>& heights, double& one);

  // About the share of one height in all; the first one is the highest. All are 0 where the longest
  // sequences, on ranks of their own, are all that there is.
  static double shareOf(const std::vector<double>& heights, double one);

  static void erase(std::vector<double>& heights, double& one);

  Xorshift random_;
};

}  // namespace hdpcomm::planner
