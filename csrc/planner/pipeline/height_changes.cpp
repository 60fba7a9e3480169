#include "planner/pipeline/height_changes.hpp"

#include <algorithm>
#include <functional>

namespace hdpcomm::planner {

void HeightChanges::apply(Shape& shape) {
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

void HeightChanges::scale(std::vector<double>& heights, double factor) {
  for (double& height : heights) height *= factor;
}

void HeightChanges::change(std::vector<double>& heights, const std::vector<double>& others,
                           double part) {
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

void HeightChanges::split(std::vector<double>& heights, double& one) {
  const double second = one * (0.45 + 0.3 * random_.unit());
  one *= 0.45 + 0.3 * random_.unit();
  heights.push_back(second);
}

void HeightChanges::merge(std::vector<double>& heights, double& one, double& other) {
  other = (one + other) * (0.65 + 0.35 * random_.unit());
  erase(heights, one);
}

void HeightChanges::add(std::vector<double>& heights, double one) {
  const double added = one * (random_.below(2) == 0 ? 1 : random_.unit());
  scale(heights, 1 - shareOf(heights, added) * random_.unit());
  heights.push_back(added);
}

void HeightChanges::drop(std::vector<double>& heights, double& one) {
  if (heights.size() < 2) return;
  const double dropped = one;
  erase(heights, one);
  scale(heights, 1 + shareOf(heights, dropped) * random_.unit());
}

double HeightChanges::shareOf(const std::vector<double>& heights, double one) {
  const double highest = std::max(one, heights.front());
  return highest > 0 ? one / (static_cast<double>(heights.size()) * highest) : 0;
}

void HeightChanges::erase(std::vector<double>& heights, double& one) {
  heights.erase(heights.begin() + (&one - heights.data()));
}

}  // namespace hdpcomm::planner
