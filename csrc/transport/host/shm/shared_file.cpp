#include "transport/host/shm/shared_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::shm {
namespace {

int createMemoryFile(const char* name) {
  return ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

bool memoryFilesAreDenied() {
  const Fd tried(createMemoryFile("hdpcomm-probe"));
  return tried.get() < 0 && (errno == EPERM || errno == EACCES || errno == ENOSYS);
}

}  // namespace

Fd createSharedFileAnywhere(const char* name, size_t bytes) {
  if (!memoryFilesAreDenied()) return createSharedFile(name, bytes);
  std::string tried;
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    // O_EXCL: it can never be given a name.
    Fd fd(::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600));
    // Its space is taken now: later, a full file system would end this process by SIGBUS.
    const int error =
        fd.get() < 0 ? errno : ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
    if (error == 0) return fd;
    tried += std::string(tried.empty() ? "" : ", ") + folder + ": " + std::strerror(error);
  }
  throw Error(ErrorKind::kInternal,
              "no shared memory of " + std::to_string(bytes) +
                  " bytes: memfd_create() is not allowed here, and no file could take its place (" +
                  tried + "); allow it, make room, or take transport='tcp'");
}

Fd createSharedFile(const char* name, size_t bytes) {
  Fd fd(HDP_SYS(createMemoryFile(name)));
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
  const bool sealed = seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
  const bool unnamed = info.st_nlink == 0 && (info.st_mode & 0777) == 0600;
  if (!S_ISREG(info.st_mode) || (!sealed && !(unnamed && memoryFilesAreDenied()))) {
    throw Error(ErrorKind::kInternal,
                path + " is no memory file of sealed size: it is none of this version of hdpcomm");
  }
  *bytes = static_cast<size_t>(info.st_size);
  return fd;
}

}  // namespace hdpcomm::shm
