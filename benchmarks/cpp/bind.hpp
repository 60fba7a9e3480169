// Binds a rank to a core of its own where there are enough, as mpirun does.
#pragma once

#include <sched.h>

inline void bind(int rank, int ranks) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < ranks) return;
  int core = -1;
  for (int seen = 0; seen <= rank; ++core) {
    if (CPU_ISSET(core + 1, &allowed)) ++seen;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof(one), &one);
}
