// The largest value of each run of neighbours.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace hdpcomm::planner {

// Item i is the largest one of values i to i + size - 1.
template <typename T>
std::vector<T> windowMaxima(const std::vector<T>& values, int size) {
  const auto width = static_cast<size_t>(size);
  std::vector<T> maxima;
  std::deque<size_t> falling;  // places of values that no later one of the window exceeds
  for (size_t i = 0; i < values.size(); ++i) {
    while (!falling.empty() && values[falling.back()] <= values[i]) falling.pop_back();
    falling.push_back(i);
    if (falling.front() + width <= i) falling.pop_front();
    if (i + 1 >= width) maxima.push_back(values[falling.front()]);
  }
  return maxima;
}

}  // namespace hdpcomm::planner
