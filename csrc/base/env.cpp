#include "base/env.hpp"

#include <cstdlib>

#include "base/error.hpp"

namespace hdpcomm {
namespace {

struct Row {
  const char* name;
  const char* fallback;
  const char* meaning;
};

constexpr Row kTable[] = {
    {"HDPCOMM_TIMEOUT", "60",
     "seconds before an operation raises CommTimeout (init(timeout=) wins)"},
    {"HDPCOMM_SHM_EAGER_BYTES", "8192",
     "messages up to this size are copied through shared memory at once"},
    {"HDPCOMM_SHM_PAYLOAD_BYTES", "262144",
     "shared memory for eager and chunked data of an ordered pair of ranks"},
    {"HDPCOMM_SHM_CMA", "1", "0: do not use process_vm_readv, send big messages in chunks"},
    {"HDPCOMM_SPIN_US", "1",
     "microseconds of busy waiting before sched_yield; ranks that share cores yield at once"},
    {"HDPCOMM_YIELD_US", "200",
     "microseconds of sched_yield after that, before sleeping on a futex"},
    {"HDPCOMM_LIVENESS_S", "0.2", "seconds between looks at whether the awaited peers still live"},
    {"HDPCOMM_SILENCE_S", "20",
     "seconds without a sign of life after which an awaited peer on another host is lost"},
    {"HDPCOMM_TRANSPORT", "auto", "the transport of init() where the program names none"},
    {"HDPCOMM_HOSTID", "",
     "part of this rank's host identity: ranks with different values do not share memory"},
    {"HDPCOMM_COSTS", "",
     "file with the measured costs of the transports; unset: hdpcomm/costs.json in the user's "
     "cache"},
    {"HDPCOMM_NCCL", "", "the libnccl.so.2 to use; unset: a wheel's, torch's, or the system's"},
    {"HDPCOMM_NCCL_CONNECT", "1",
     "nccl: init() connects each rank with those up to this distance; other pairs at first use"},
    {"HDPCOMM_NCCL_ONE_SIDED", "0",
     "nccl: 1: ring attention's keys and values are put (ncclPutSignal, 2.29.7 or newer); auto: if "
     "init() measures that to be faster"},
    {"HDPCOMM_DEVICE_SLOT_BYTES", "2097152",
     "device memory of a slot, in which a piece of a message arrives; the same on all ranks"},
    {"HDPCOMM_DEVICE_SLOTS", "4", "slots of an ordered pair of ranks on a device"},
    {"HDPCOMM_DEVICE_LANES", "2",
     "streams of an ordered pair of ranks, that is, copy engines that share a message"},
    {"HDPCOMM_DEVICE_LANDING_BYTES", "67108864",
     "device memory of a rank in which ring attention's keys and values arrive"},
    {"HDPCOMM_DEVICE_WINDOW_BYTES", "33554432",
     "device memory of a rank in which the kernels of its peers read and write"},
};

std::string read(const Row& row) {
  const char* value = std::getenv(row.name);
  return value != nullptr && *value != '\0' ? value : row.fallback;
}

double number(const Row& row, double minimum, double maximum) {
  const std::string text = read(row);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || !(value >= minimum) || !(value <= maximum)) {
    throwInvalidUsage(std::string(row.name) + "='" + text + "' is not a number between " +
                      std::to_string(minimum) + " and " + std::to_string(maximum) + " (" +
                      row.meaning + "); unset it or give one");
  }
  return value;
}

Env readAll() {
  Env env{};
  env.timeout_s = number(kTable[0], 0.001, 1e7);
  env.eager_bytes = static_cast<size_t>(number(kTable[1], 0, 1 << 20));
  env.payload_bytes = static_cast<size_t>(number(kTable[2], 65536, 1 << 28));
  env.cma = number(kTable[3], 0, 1) != 0;
  env.spin_us = number(kTable[4], 0, 1e6);
  env.yield_us = number(kTable[5], 0, 1e7);
  env.liveness_s = number(kTable[6], 0.01, 1.0);
  env.silence_s = number(kTable[7], 0.1, 1e7);
  return env;
}

}  // namespace

const Env& Env::get() {
  static const Env env = readAll();
  return env;
}

std::vector<EnvVariable> environmentTable() {
  std::vector<EnvVariable> table;
  for (const Row& row : kTable) table.push_back({row.name, row.fallback, row.meaning, read(row)});
  return table;
}

}  // namespace hdpcomm
