// Other processes of this host, and forks of this one.
#pragma once

#include <atomic>
#include <cstdint>

namespace hdpcomm {

// When this process started, as /proc/<pid>/stat has it (field 22). Throws Error where it cannot be
// read.
uint64_t ownStartTime();

// Whether there is such a process and it has not ended. What cannot be found out (no descriptors
// are left, /proc is hidden) is no death.
bool processRuns(int pid);

// Whether the process that had this start time still runs: a pid may have been given to another.
// Keeps a descriptor of each process that it was asked about, so that it knows even when no more
// can be opened; a process that has ended is forgotten.
bool processAlive(int pid, uint64_t start_time);

extern std::atomic<uint32_t> fork_generation;

// Grows with each fork between the first process and this one.
inline uint32_t forkGeneration() noexcept {
  return fork_generation.load(
      std::memory_order_relaxed);  // written before the child's main goes on
}

}  // namespace hdpcomm
