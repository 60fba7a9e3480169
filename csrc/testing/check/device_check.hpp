// SimDevice's check mode (docs/device.md). While a check runs, the simulated devices that are
// opened take part in it: their operations are run in an order that the seed draws, and
// written down. At the end the record is replayed with a clock for each stream and host thread, and
// what no event, flag or synchronize orders is reported.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/device_api.hpp"

namespace hdpcomm::testing {

// One operation in a report.
struct CheckedOp {
  std::string what;  // "copy (read)"
  std::string who;   // "stream 2 of device 0", "host of rank 1"
  Site site;
};

struct CheckReport {
  // "missing wait", "reused too early", "use after free", "never written", "deadlock"
  std::string kind;
  CheckedOp first;
  CheckedOp second;
  std::string text;  // one sentence on both, with the memory
};

// A call site that orders: "record", "wait", "writeValue", "waitValue" or "synchronize"; a kernel's
// own flags count as "kernel signal" and "kernel wait".
struct OrderingSite {
  std::string call;
  Site site;
  size_t uses = 0;
};

namespace check {
class Session;
}

// One check at a time in a process. Thread-safe.
class DeviceCheck {
 public:
  // Throws InvalidUsage while another check runs.
  explicit DeviceCheck(uint64_t seed);
  ~DeviceCheck();
  DeviceCheck(const DeviceCheck&) = delete;
  DeviceCheck& operator=(const DeviceCheck&) = delete;

  // The calling thread is the host of this rank until it leaves. When all ranks that entered wait
  // for devices and no operation can run, the wait with the shortest timeout ends at once.
  void enterRank(int rank);
  void leaveRank();
  // Runs what is left and ends the check; devices that are still open are then of no use. The other
  // calls below are for afterwards.
  void finish();
  // Unordered pairs of operations: each pair of lines once, in an order that depends on the program
  // and the seed only. `ignore`: replays as if no operation of that site had been called.
  std::vector<CheckReport> reports(const std::optional<OrderingSite>& ignore = {}) const;
  std::vector<OrderingSite> orderingSites() const;
  uint64_t numOperations() const;

 private:
  std::shared_ptr<check::Session> session_;
};

}  // namespace hdpcomm::testing
