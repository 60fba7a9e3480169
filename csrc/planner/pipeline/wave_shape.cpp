#include "planner/pipeline/wave_shape.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace hdpcomm::planner {

Shape Shape::withoutUnused() const {
  Shape used = *this;
  if (ramps > 0) {
    used.up = used.down = 0;
    used.growth = used.last = 0;
  } else {
    used.later = 0;
  }
  if (top <= 0) {
    used.beside = used.own = 0;
    used.slices = 1;
  }
  return used;
}

std::vector<double> relativeHeights(const Shape& shape, const PipelineRamps& ramps) {
  std::vector<double> heights;
  if (shape.ramps > 0) {
    heights = ramps.heights(shape.waves, shape.later);
    for (double& height : heights) height = std::pow(height, shape.ramps);
    std::sort(heights.begin(), heights.end(), std::greater<>());
    return heights;
  }
  for (int i = 1; i <= shape.up; ++i) heights.push_back(std::pow(shape.growth, -i));
  for (int i = 1; i <= shape.down; ++i) {
    heights.push_back(1 - (1 - shape.last) * i / shape.down);
  }
  while (static_cast<int>(heights.size()) < shape.waves) heights.push_back(1);
  std::sort(heights.begin(), heights.end(), std::greater<>());
  return heights;
}

}  // namespace hdpcomm::planner
