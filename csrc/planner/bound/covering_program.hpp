// A linear program: the least cost of columns that cover all demands, of which only those columns
// are made that its prices ask for.
#pragma once

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
  CoveringProgram(const std::vector<double>& demands, const std::vector<double>& costs);

  // The cost so far: an upper limit of the least one.
  double cost() const;

  // What a unit of each demand is worth at the moment; none is negative.
  std::vector<double> prices();

  // Takes a column that is worth more than it costs in place of another one. False if that changes
  // nothing.
  bool enter(const Column& column);

 private:
  static constexpr double kTiny = 1e-10;

  std::vector<double> costs_;    // of the columns of the basis
  std::vector<double> amounts_;  // of each
  std::vector<std::vector<double>> inverse_;
};

}  // namespace hdpcomm::planner
