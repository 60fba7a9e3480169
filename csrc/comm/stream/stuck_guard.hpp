// The end of a process that nothing else can end well.
//
// A driver whose stream is full blocks the thread that enqueues one operation more, and with it
// every other one that enqueues something in the context. If the stream waits for a rank that is
// gone, and the program's own kernels fill it, then nobody can set the flags that would release it.
// The guard calls nothing of the device and takes no lock, so it sees that; after its limit it says
// so on stderr and ends the process, as NCCL's watchdog in torch does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace hdpcomm {

class StuckGuard {
 public:
  static constexpr int kExitCode = 70;  // EX_SOFTWARE of sysexits.h

  // `lost` says what makes it hopeless, if anything does; it is asked on the guard's thread.
  StuckGuard(int rank, double limit_s, std::function<std::optional<std::string>()> lost);
  ~StuckGuard() { stop(); }
  StuckGuard(const StuckGuard&) = delete;
  StuckGuard& operator=(const StuckGuard&) = delete;

  // Whoever calls this from time to time is not stuck.
  void beat() { beats_.fetch_add(1, std::memory_order_relaxed); }
  void stop();

 private:
  void watch();

  const int rank_;
  const double limit_s_;
  const std::function<std::optional<std::string>()> lost_;
  std::atomic<uint64_t> beats_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hdpcomm
