#include "comm/stream/stuck_guard.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

namespace hdpcomm {

StuckGuard::StuckGuard(int rank, double limit_s, std::function<std::optional<std::string>()> lost)
    : rank_(rank), limit_s_(limit_s), lost_(std::move(lost)), thread_([this] { watch(); }) {}

void StuckGuard::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StuckGuard::watch() {
  using Clock = std::chrono::steady_clock;
  const auto interval = std::chrono::duration<double>(std::clamp(limit_s_ / 5, 0.05, 1.0));
  uint64_t seen = 0;
  auto hopeless_since = Clock::now();
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, interval, [this] { return stop_; })) {
    const uint64_t beats = beats_.load(std::memory_order_relaxed);
    const auto now = Clock::now();
    const auto reason = beats == std::exchange(seen, beats) ? lost_() : std::nullopt;
    if (!reason) {
      hopeless_since = now;
      continue;
    }
    const double seconds = std::chrono::duration<double>(now - hopeless_since).count();
    if (seconds < limit_s_) continue;
    const std::string text =
        "hdpcomm: rank " + std::to_string(rank_) + " ends its process: " + *reason + ", and for " +
        std::to_string(static_cast<int>(seconds)) +
        " s nothing has come back from the driver, since the program's own work fills a stream "
        "behind an operation that can no longer end\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    std::_Exit(kExitCode);
  }
}

}  // namespace hdpcomm
