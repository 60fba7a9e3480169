// One pipeline by itself under 1F1B.
#pragma once

#include <deque>
#include <vector>

namespace hdpcomm::planner {

// Makespan of micro-batches of these times on one pipeline under 1F1B.
class SinglePipeline {
 public:
  SinglePipeline(int stages, double forward) : stages_(stages), forward_(forward) {}

  double run(const std::deque<double>& times) { return run(times.begin(), times.end()); }

  template <typename Iterator>
  double run(Iterator times, Iterator end);

 private:
  void pass(int i, int stage, double seconds);

  const int stages_;
  const double forward_;
  std::vector<double> given_;  // by micro-batch: when its last pass ends
  std::vector<double> free_;   // by device: when its last pass ends
};

}  // namespace hdpcomm::planner
