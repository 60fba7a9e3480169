// Random changes of the heights of waves, for the search for shorter plans of pipelines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include "base/xorshift.hpp"
#include "planner/pipeline/wave_shape.hpp"

namespace hdpcomm::planner {

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

}  // namespace hdpcomm::planner
