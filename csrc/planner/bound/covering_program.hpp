// A linear program: the least cost of columns that cover all demands, of which only those columns
// are made that its prices ask for.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

namespace hdpcomm::planner {

// Minimises sum cost_c x_c over x >= 0, where sum covers_c,i x_c >= demand_i for each i, by the
// revised simplex method with an explicit inverse.
class CoveringProgram {
 public:
  struct Column {
    double cost = 1;
    std::vector<double> covers;
  };

  // `costs[i]`: of covering one unit of demand i alone.
  CoveringProgram(const std::vector<double>& demands, const std::vector<double>& costs)
      : costs_(costs), amounts_(demands), inverse_(demands.size()) {
    for (size_t i = 0; i < demands.size(); ++i) {
      inverse_[i].assign(demands.size(), 0.0);
      inverse_[i][i] = 1;
    }
  }

  // The cost so far: an upper limit of the least one.
  double cost() const {
    double sum = 0;
    for (size_t i = 0; i < costs_.size(); ++i) sum += costs_[i] * amounts_[i];
    return sum;
  }

  // What a unit of each demand is worth at the moment; none is negative.
  std::vector<double> prices() {
    for (size_t tried = 0; tried < 2 * costs_.size(); ++tried) {
      std::vector<double> found(costs_.size(), 0.0);
      for (size_t i = 0; i < costs_.size(); ++i) {
        for (size_t j = 0; j < costs_.size(); ++j) found[j] += costs_[i] * inverse_[i][j];
      }
      size_t least = 0;
      for (size_t j = 1; j < found.size(); ++j) {
        if (found[j] < found[least]) least = j;
      }
      if (found[least] >= -kTiny) {
        for (double& price : found) price = std::max(price, 0.0);
        return found;
      }
      Column surplus{0, std::vector<double>(costs_.size(), 0.0)};  // covering more than is asked
      surplus.covers[least] = -1;
      if (!enter(surplus)) break;
    }
    return {};
  }

  // Takes a column that is worth more than it costs in place of another one. False if that changes
  // nothing.
  bool enter(const Column& column) {
    const size_t size = costs_.size();
    std::vector<double> share(size, 0.0);
    for (size_t i = 0; i < size; ++i) {
      for (size_t j = 0; j < size; ++j) share[i] += inverse_[i][j] * column.covers[j];
    }
    size_t out = size;
    double least = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < size; ++i) {
      if (share[i] > kTiny && amounts_[i] / share[i] < least) {
        least = amounts_[i] / share[i];
        out = i;
      }
    }
    if (out == size) return false;
    const double pivot = 1 / share[out];
    for (double& each : inverse_[out]) each *= pivot;
    amounts_[out] = least;
    costs_[out] = column.cost;
    for (size_t i = 0; i < size; ++i) {
      if (i == out || share[i] == 0) continue;
      for (size_t j = 0; j < size; ++j) inverse_[i][j] -= share[i] * inverse_[out][j];
      amounts_[i] = std::max(0.0, amounts_[i] - share[i] * least);
    }
    return true;
  }

 private:
  static constexpr double kTiny = 1e-10;

  std::vector<double> costs_;    // of the columns of the basis
  std::vector<double> amounts_;  // of each
  std::vector<std::vector<double>> inverse_;
};

}  // namespace hdpcomm::planner
