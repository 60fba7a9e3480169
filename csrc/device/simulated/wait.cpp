#include "device/simulated/wait.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace hdpcomm::simulated {

// Not the private form: flags are words of memory that other processes map.
void futexWait(const uint32_t* word, uint32_t seen, std::chrono::nanoseconds at_most) {
  const auto count = at_most.count();
  timespec time{static_cast<time_t>(count / 1'000'000'000),
                static_cast<long>(count % 1'000'000'000)};
  ::syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futexWake(const uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hdpcomm::simulated
