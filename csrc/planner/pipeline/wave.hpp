// A wave of a pipeline's plan (wave_planner.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/model/cost_model.hpp"

namespace hdpcomm::planner {

// Micro-batches side by side on neighbouring by_speed, fastest ranks first (ranks_by_speed.hpp).
struct Wave {
  static constexpr size_t kIdle = static_cast<size_t>(-1);  // a job: the ranks stay idle

  struct Wide {  // on several ranks
    size_t job;
    int size;
    double seconds;  // of each slice
  };

  int first = 0;
  int last = 0;       // the place after the last one
  double height = 0;  // of each slice
  int slices = 1;  // that its sequences run in, one after the other; other ranks run as many packs
  std::vector<Wide> wide;
  int used = 0;             // the place after their ranks
  std::vector<Load> packs;  // of the ranks from there on, `slices` for each
  int placeOf(size_t pack) const { return used + static_cast<int>(pack) / slices; }
  bool turned = false;  // lies on its ranks the other way round
};

}  // namespace hdpcomm::planner
