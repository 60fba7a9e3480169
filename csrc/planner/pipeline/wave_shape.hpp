// What a plan of waves looks like (wave_planner.hpp): how many there are, and how high they are.
#pragma once

#include <limits>
#include <vector>

#include "planner/model/pipeline_ramps.hpp"

namespace hdpcomm::planner {

// Seconds of the waves on the ranks that are reserved for the longest sequences, beside those of
// these, and on the other ranks.
struct Heights {
  std::vector<double> reserved, others;

  bool operator==(const Heights&) const = default;
};

// How the heights of the waves rise and fall.
struct Shape {
  static constexpr double kSlack = 0.04;

  int waves = 1;
  int up = 0;             // waves that are lower than the highest ones at the start,
  int down = 0;           // and at the end
  double growth = 1.5;    // of those at the start, from one to the next
  double last = 0.45;     // height of the last one over that of the highest ones
  double ramps = 0;       // instead: the heights of PipelineRamps, to the power of this,
  int later = 0;          // with the highest one so many places later
  double slack = kSlack;  // of the heights over their work
  double full = 0;  // least part of a wave that a sequence takes on several ranks, if it need not
  bool spread = false;  // ranks that long sequences leave over in a wave go to these
  bool nodes = false;   // sequences that fit into a node lie in one, what is left of it may idle
  // Seconds of a wave of the longest sequences, beyond those; 0: none. The ranks that these take
  // run only the `beside` highest of the other waves.
  double top = 0;
  int beside = 0;
  int own = std::numeric_limits<int>::max();  // most sequences in that wave
  int slices = 1;                             // that these run in
  int every = 1;                              // slices of the sequences of all other waves
  Heights given = {};                         // instead of all that; empty: none

  bool operator==(const Shape&) const = default;

  // Equal for shapes that make the same waves.
  Shape withoutUnused() const;
};

std::vector<double> relativeHeights(const Shape& shape, const PipelineRamps& ramps);

}  // namespace hdpcomm::planner
