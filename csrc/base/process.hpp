// Other processes of this host.
#pragma once

#include <cstdint>

namespace hdpcomm {

// Field 22 of /proc/<pid>/stat (start time) and its state letter; 0 and 'X' when there is no such
// process.
struct ProcessInfo {
  char state = 'X';
  uint64_t start_time = 0;
};

ProcessInfo processInfo(int pid);

// Whether there is such a process and it has not ended.
bool processRuns(int pid);

// Whether the process that had this start time still runs: a pid may have been given to another.
bool processAlive(int pid, uint64_t start_time);

}  // namespace hdpcomm
