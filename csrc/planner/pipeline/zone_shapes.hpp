// Shapes of plans for pipelines in which the longest sequences of a step follow each other on ranks
// of their own, a zone. A pipeline is idle while its highest micro-batch goes down the stages and
// comes back, except for what those next to it hide. Where the longest sequences lie side by side,
// much lower waves follow them on all ranks. One after the other they hide each other, and the
// other ranks have no micro-batch that is as high.
#pragma once

#include <vector>

#include "planner/model/problem.hpp"
#include "planner/pipeline/wave_shape.hpp"

namespace hdpcomm::planner {

// Those that may be shorter than a plan of so many seconds. `work`: rank-seconds of all sequences;
// `share`: of forward passes.
std::vector<Shape> zoneShapes(const Problem& problem, double work, double share, double seconds);

}  // namespace hdpcomm::planner
