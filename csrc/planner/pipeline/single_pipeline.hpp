// One pipeline by itself under 1F1B.
#pragma once

#include <deque>
#include <vector>

namespace hdpcomm::planner {

// Makespan of micro-batches of these times on one pipeline under 1F1B.
class SinglePipeline {
 public:
  SinglePipeline(int stages, double forward) : stages_(stages), forward_(forward) {}

  using Times = std::deque<double>::const_iterator;
  double run(Times times, Times end);

 private:
  void pass(int i, int stage, double seconds);

  const int stages_;
  const double forward_;
  std::vector<double> given_;  // by micro-batch: when its last pass ends
  std::vector<double> free_;   // by device: when its last pass ends
};

}  // namespace hdpcomm::planner
