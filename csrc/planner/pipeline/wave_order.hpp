// The order in which the waves of a plan drain and fill a pipeline fastest, and which way round
// each of them lies.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "planner/model/cost_model.hpp"
#include "planner/model/problem.hpp"
#include "planner/pipeline/wave.hpp"

namespace hdpcomm::planner {

class WaveOrder {
 public:
  // Waves beside a new one that decide at which end it costs less.
  static constexpr std::ptrdiff_t kNear = 64;

  explicit WaveOrder(const CostModel& cost) : cost_(cost) {}

  // Order of the waves that the last find() found.
  const std::vector<size_t>& waves() const { return order_; }
  // Seconds of a pipeline that runs them so at their full heights.
  double seconds() const { return seconds_; }

  // First the waves of the places before `reserved`, then those of the others, which have no
  // micro-batch in common. False if a pipeline takes longer than `limit` for them.
  bool find(const std::vector<Wave>& waves, int reserved, double limit);

 private:
  // From the highest wave outwards: each goes to the end where it costs less. `seconds`: of a rank
  // of these heights.
  std::deque<size_t> outwards(const std::vector<Wave>& waves, const std::vector<size_t>& some,
                              double& seconds) const;

  const CostModel& cost_;
  std::vector<size_t> order_;
  double seconds_ = 0;
};

// The longest sequences of a wave lie on its first ranks, and these have more to do than the last
// ones. Turns waves, so that all ranks have about as much to do.
void turnWaves(std::vector<Wave>& waves, const Problem& problem);

}  // namespace hdpcomm::planner
