// The shared-memory transport: ranks that are processes or threads of one host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hdpcomm/transport/transport.hpp"

namespace hdpcomm {

class ShmSegment {
 public:
  virtual ~ShmSegment() = default;
  // How another process of this host opens the segment; valid until release().
  virtual std::string address() const = 0;
  // Closes the descriptor once every rank has mapped the segment; the mapping stays.
  virtual void release() = 0;
};

// Throws InvalidUsage unless 1 <= num_ranks <= 4096.
std::shared_ptr<ShmSegment> createShmSegment(int num_ranks);
// `address` is what address() gave on the creating rank, which must still live.
std::shared_ptr<ShmSegment> openShmSegment(const std::string& address, int num_ranks);

// Equal on two processes exactly when shared memory can connect them (same boot of the same kernel,
// same pid namespace).
std::string hostIdentity();
// Whether this kernel lets a process read the memory of its siblings (probed on itself), and offers
// memfd.
bool processVmReadvWorks();
bool memfdWorks();

// Marks `rank` as present. Other ranks may be absent until shmWaitAllReady() has returned.
// `members`: the ranks of the segment that will come and with which there are messages; empty: all.
std::unique_ptr<Transport> makeShmTransport(std::shared_ptr<ShmSegment> segment, int rank,
                                            std::vector<int> members = {});
// Waits until all ranks of the transport's segment are present. Throws CommTimeout naming those
// that are not.
void shmWaitAllReady(Transport& transport, double timeout_s);

}  // namespace hdpcomm
