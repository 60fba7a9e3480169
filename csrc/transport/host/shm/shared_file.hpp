// Anonymous files that processes of one user map. Their sizes are sealed, so that no other process
// can cut one short under a mapping (its reader would get SIGBUS).
#pragma once

#include <cstddef>
#include <string>

#include "base/fd.hpp"

namespace hdpcomm::shm {

// Throws Error when the system refuses it.
Fd createSharedFile(const char* name, size_t bytes);
// The same; where memfd_create() is not allowed (seccomp), a file without a name in /dev/shm or
// /tmp, all of whose space is taken at once. Its size is not sealed.
Fd createSharedFileAnywhere(const char* name, size_t bytes);

// Opens the file `descriptor` of process `pid`, which must be one of createSharedFile(), or of
// createSharedFileAnywhere() if this process may not call memfd_create() either. Throws Error,
// which names what is wrong: it cannot be opened, is another user's, or can be cut short. `flags`:
// as of open().
Fd openSharedFile(int pid, int descriptor, int flags, size_t* bytes);

}  // namespace hdpcomm::shm
