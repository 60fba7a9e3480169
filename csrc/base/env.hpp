// Environment variables of the core, read once. `hdpcomm doctor` prints the table.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace hdpcomm {

struct Env {
  double timeout_s;      // HDPCOMM_TIMEOUT
  size_t eager_bytes;    // HDPCOMM_SHM_EAGER_BYTES
  size_t payload_bytes;  // HDPCOMM_SHM_PAYLOAD_BYTES
  bool cma;              // HDPCOMM_SHM_CMA
  double spin_us;        // HDPCOMM_SPIN_US
  double yield_us;       // HDPCOMM_YIELD_US
  double liveness_s;     // HDPCOMM_LIVENESS_S
  double silence_s;      // HDPCOMM_SILENCE_S

  static const Env& get();
};

struct EnvVariable {
  const char* name;
  const char* fallback;
  const char* meaning;
  std::string value;  // as read, or the fallback
};

// All variables with their documentation and the values in force.
std::vector<EnvVariable> environmentTable();

}  // namespace hdpcomm
