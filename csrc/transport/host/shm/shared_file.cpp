#include "transport/host/shm/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/error.hpp"

namespace hdpcomm::shm {

Fd createSharedFile(const char* name, size_t bytes) {
  Fd fd(HDP_SYS(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  HDP_SYS(::ftruncate(fd.get(), static_cast<off_t>(bytes)));
  HDP_SYS(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
  return fd;
}

Fd openSharedFile(int pid, int descriptor, int flags, size_t* bytes) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  // O_NONBLOCK: a named pipe in its place must not make this rank wait.
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) throwSystemError(("open of " + path).c_str(), __FILE__, __LINE__, errno);
  struct stat info{};
  HDP_SYS(::fstat(fd.get(), &info));
  if (info.st_uid != ::geteuid()) {
    throw Error(ErrorKind::kInternal, path + " belongs to user " + std::to_string(info.st_uid) +
                                          ", this process to user " + std::to_string(::geteuid()) +
                                          ": shared memory of another user is not mapped");
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (!S_ISREG(info.st_mode) || seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw Error(ErrorKind::kInternal,
                path + " is no memory file of sealed size: it is none of this version of hdpcomm");
  }
  *bytes = static_cast<size_t>(info.st_size);
  return fd;
}

}  // namespace hdpcomm::shm
