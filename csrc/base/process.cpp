#include "base/process.hpp"

#include <fstream>
#include <sstream>
#include <string>

namespace hdpcomm {

ProcessInfo processInfo(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  const size_t name_end = line.rfind(')');  // the name may hold spaces and brackets
  if (name_end == std::string::npos) return {};
  std::istringstream fields(line.substr(name_end + 1));
  ProcessInfo info;
  fields >> info.state;
  std::string skipped;
  for (int field = 4; field <= 21; ++field) fields >> skipped;
  fields >> info.start_time;
  return info;
}

namespace {

bool runs(const ProcessInfo& info) { return info.state != 'X' && info.state != 'Z'; }

}  // namespace

bool processRuns(int pid) { return runs(processInfo(pid)); }

bool processAlive(int pid, uint64_t start_time) {
  const ProcessInfo info = processInfo(pid);
  return runs(info) && info.start_time == start_time;
}

}  // namespace hdpcomm
