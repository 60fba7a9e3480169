// The shared-memory transport: ranks that are processes or threads of one host.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace hdpcomm {

class ShmSegment {
 public:
  virtual ~ShmSegment() = default;
  // The address by which another process of this host opens the segment; valid until release().
  virtual std::string address() const = 0;
  // Closes the descriptor once every rank has mapped the segment; the mapping stays.
  virtual void release() = 0;
};

// Bytes of a segment; pages are taken when they are first touched. It and createShmSegment() throw
// InvalidUsage unless 1 <= num_ranks <= 4096.
size_t shmSegmentBytes(int num_ranks);
std::shared_ptr<ShmSegment> createShmSegment(int num_ranks);
// `address` comes from address() on the creating rank, whose process must still exist.
std::shared_ptr<ShmSegment> openShmSegment(const std::string& address, int num_ranks);

// Equal in two processes exactly when shared memory can connect them: same boot of the same kernel,
// same pid namespace, same user.
std::string hostIdentity();

// Marks `rank` as present. Other ranks may be absent until shmWaitAllReady() has returned.
// `members`: the ranks of the segment that join and exchange messages; empty: all.
std::unique_ptr<Transport> makeShmTransport(std::shared_ptr<ShmSegment> segment, int rank,
                                            std::vector<int> members = {});
// How to wait for the other ranks.
struct ShmJoining {
  double timeout_s = 0;
  // By rank of the segment: its pid, if it is known before the rank has joined, else 0. May be
  // empty.
  std::vector<int> pids = {};
  std::function<void()> check = {};  // called a few times a second; may throw to give up (Ctrl-C)
};

// Waits until all members are present. Throws CommTimeout naming those that are not, and PeerLost
// as soon as a member has died or given up while others are absent.
void shmWaitAllReady(Transport& transport, const ShmJoining& joining);

}  // namespace hdpcomm
