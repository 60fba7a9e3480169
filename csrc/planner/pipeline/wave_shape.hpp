// What a plan of waves looks like (wave_planner.hpp): how many there are, how high they are, and
// what each of them runs.
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "planner/model/cost_model.hpp"

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
  Heights given = {};                         // instead of all that; empty: none

  bool operator==(const Shape&) const = default;

  // Equal for shapes that make the same waves.
  Shape withoutUnused() const {
    Shape used = *this;
    if (ramps > 0) {
      used.up = used.down = 0;
      used.growth = 0;
    } else {
      used.later = 0;
    }
    if (top <= 0) used.beside = used.own = 0;
    return used;
  }
};

// Micro-batches side by side on neighbouring by_speed, fastest ranks first (ranks_by_speed.hpp).
struct Wave {
  static constexpr size_t kIdle = static_cast<size_t>(-1);  // a job: the ranks stay idle

  struct Wide {  // on several ranks
    size_t job;
    int size;
    double seconds;
  };

  int first = 0;
  int last = 0;  // the place after the last one
  double height = 0;
  std::vector<Wide> wide;
  int used = 0;             // the place after their ranks
  std::vector<Load> packs;  // of the ranks from there on
  int placeOf(size_t pack) const { return used + static_cast<int>(pack); }
};

}  // namespace hdpcomm::planner
