#include "planner/bound/covering_program.hpp"

#include <algorithm>
#include <limits>

namespace hdpcomm::planner {

CoveringProgram::CoveringProgram(const std::vector<double>& demands,
                                 const std::vector<double>& costs)
    : costs_(costs), amounts_(demands), inverse_(demands.size()) {
  for (size_t i = 0; i < demands.size(); ++i) {
    inverse_[i].assign(demands.size(), 0.0);
    inverse_[i][i] = 1;
  }
}

double CoveringProgram::cost() const {
  double sum = 0;
  for (size_t i = 0; i < costs_.size(); ++i) sum += costs_[i] * amounts_[i];
  return sum;
}

std::vector<double> CoveringProgram::prices() {
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

bool CoveringProgram::enter(const Column& column) {
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

}  // namespace hdpcomm::planner
