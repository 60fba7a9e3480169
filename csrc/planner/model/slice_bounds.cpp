#include "planner/model/slice_bounds.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

double timesTheFirst(int count, double growth) noexcept {
  double all = 0;
  for (int i = 0; i < count; ++i) all = all * growth + 1;
  return all;
}

bool sliceable(const Problem& problem, int32_t sequence) {
  const auto length = static_cast<double>(problem.lengths()[sequence]);
  return problem.withRiders(sequence).size() == 1 &&
         (problem.hasSegments(sequence) ||
          problem.own(sequence).squares == problem.cost().squares(0, length));
}

namespace {

// As memory allows, they take about as long as each other; there may be more than `slices`.
std::vector<int64_t> boundsByTime(const Problem& problem, int32_t sequence, int size, int slices,
                                  double growth) {
  const int64_t length = problem.lengths()[sequence];
  // The first x tokens take about a x^2 / d + (h + b / d) x on d ranks; of a tree, or where keys
  // are limited, less.
  const CostModel& cost = problem.cost();
  const CostParams& params = cost.params();
  const double square = params.attention / size;
  const double linear = params.piece + params.linear / size;
  const bool less = params.limited > 0 || problem.hasSegments(sequence);
  const auto work = [&](int64_t tokens) {
    const auto x = static_cast<double>(tokens);
    if (less) return square * problem.squares(sequence, 0, tokens) + linear * x;
    return (square * x + linear) * x;
  };
  const int64_t most = cost.memory().capacity * size;
  std::vector<int64_t> bounds = {0};
  for (int left = slices; bounds.back() < length; --left) {
    const int64_t last = bounds.back();
    int64_t bound = length;
    if (left > 1) {
      const double wanted = work(last) + (work(length) - work(last)) / timesTheFirst(left, growth);
      // The positive root, in the form that has no difference of near numbers.
      const double below = linear + std::sqrt(linear * linear + 4 * square * wanted);
      if (below > 0) bound = std::llround(2 * wanted / below);
      if (less) {  // as much work has more tokens
        int64_t high = length;
        while (bound < high) {
          const int64_t middle = bound + (high - bound) / 2;
          if (work(middle) < wanted) {
            bound = middle + 1;
          } else {
            high = middle;
          }
        }
      }
    }
    bounds.push_back(std::min({std::max(bound, last + 1), last + most, length}));
  }
  return bounds;
}

// Tokens that a rank holds of all slices together.
int64_t heldOf(const std::vector<int64_t>& bounds, int size) {
  int64_t held = 0;
  for (size_t k = 1; k < bounds.size(); ++k) held += (bounds[k] - bounds[k - 1] + size - 1) / size;
  return held;
}

}  // namespace

std::vector<int64_t> sliceBounds(const Problem& problem, int32_t sequence, int size, int slices,
                                 double growth) {
  const int64_t length = problem.lengths()[sequence];
  const Cluster& cluster = problem.cost().cluster();
  const int64_t most = problem.cost().memory().capacity * cluster.pipeline;
  if ((length + size - 1) / size > most) return {};
  std::vector<int64_t> bounds = boundsByTime(problem, sequence, size, slices, growth);
  if (heldOf(bounds, size) > most) {
    // With as many tokens on every rank, but for the last one, they hold no more than the whole.
    for (int64_t& bound : bounds) bound = std::min((bound + size - 1) / size * size, length);
    bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  }
  if (std::ssize(bounds) > cluster.mostSlices() + 1) return {};
  return bounds;
}

Slice sliceOf(const Problem& problem, int32_t sequence, const std::vector<int64_t>& bounds,
              size_t k) {
  return {bounds[k], bounds[k + 1], k + 2 < bounds.size(),
          problem.squares(sequence, bounds[k], bounds[k + 1])};
}

}  // namespace hdpcomm::planner
