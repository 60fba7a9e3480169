#include "base/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace hdpcomm {

std::atomic<uint32_t> fork_generation{0};

namespace {

constexpr size_t kMostDescriptors = 512;  // of other processes

struct ProcessInfo {
  char state = 'X';  // its letter in /proc/<pid>/stat; 'X': there is none, '?': not found out
  uint64_t start_time = 0;
  int error = 0;  // errno, of '?'
};

ProcessInfo unknown(int error) { return {'?', 0, error}; }

ProcessInfo processInfo(int pid) {
  const Fd fd(::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return errno == ENOENT ? ProcessInfo{} : unknown(errno);
  char text[2048];
  const ssize_t bytes = ::read(fd.get(), text, sizeof text);
  if (bytes < 0) return errno == ESRCH ? ProcessInfo{} : unknown(errno);
  const std::string line(text, static_cast<size_t>(bytes));
  const size_t name_end = line.rfind(')');  // the name may hold spaces and brackets
  if (name_end == std::string::npos) return unknown(EIO);
  std::istringstream fields(line.substr(name_end + 1));
  ProcessInfo info;
  fields >> info.state;
  std::string skipped;
  for (int field = 4; field <= 21; ++field) fields >> skipped;
  fields >> info.start_time;
  return info;
}

bool runs(int pid, const ProcessInfo& info) {
  if (info.state == '?') {
    // /proc/<pid> is missing without /proc, too; the kernel knows by itself.
    return ::kill(pid, 0) == 0 || errno != ESRCH;
  }
  return info.state != 'X' && info.state != 'Z';
}

// Descriptors of processes, by pid and start time.
class Watched {
 public:
  // Whether the process runs; none if it is not watched.
  std::optional<bool> alive(int pid, uint64_t start_time) {
    const std::lock_guard lock(mutex_);
    const auto found = descriptors_.find({pid, start_time});
    if (found == descriptors_.end()) return std::nullopt;
    pollfd ended{found->second.get(), POLLIN, 0};  // readable once the process has ended
    if (::poll(&ended, 1, 0) <= 0) return true;
    descriptors_.erase(found);
    return false;
  }
  void add(int pid, uint64_t start_time, Fd descriptor) {
    const std::lock_guard lock(mutex_);
    if (descriptors_.size() < kMostDescriptors) {
      descriptors_.emplace(std::pair{pid, start_time}, std::move(descriptor));
    }
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, uint64_t>, Fd> descriptors_;
};

Watched& watched() {
  static auto* processes = new Watched;  // outlives every world
  return *processes;
}

// When the library is loaded, so before any fork that matters.
[[maybe_unused]] const int kForksAreCounted = ::pthread_atfork(
    nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint64_t ownStartTime() {
  const ProcessInfo info = processInfo(::getpid());
  if (info.start_time == 0) {
    throwSystemError("reading /proc/<pid>/stat of this process", __FILE__, __LINE__,
                     info.error != 0 ? info.error : ENOENT);
  }
  return info.start_time;
}

bool processRuns(int pid) { return runs(pid, processInfo(pid)); }

bool processAlive(int pid, uint64_t start_time) {
  if (const auto alive = watched().alive(pid, start_time)) return *alive;
  // Opened before the start time is compared: so it is of the process that has it.
  Fd descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const ProcessInfo info = processInfo(pid);
  if (!runs(pid, info)) return false;
  if (info.state == '?') return true;
  if (info.start_time != start_time) return false;
  if (descriptor.get() >= 0) watched().add(pid, start_time, std::move(descriptor));
  return true;
}

}  // namespace hdpcomm
