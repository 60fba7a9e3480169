#include "transport/host/shm/segment.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <fstream>

#include "base/error.hpp"
#include "base/settings.hpp"
#include "transport/host/shm/shared_file.hpp"

namespace hdpcomm {
namespace shm {

Segment::Segment(Fd fd, Layout layout) : fd_(std::move(fd)), layout_(layout) {
  void* address = ::mmap(nullptr, layout_.totalBytes(), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (address == MAP_FAILED)
    throwSystemError("mmap of the shared segment", __FILE__, __LINE__, errno);
  mapping_ = Mapping(address, layout_.totalBytes());
}

std::string Segment::address() const {
  if (fd_.get() < 0) throwInvalidUsage("the shared segment was released: its address is gone");
  return std::to_string(::getpid()) + ":" + std::to_string(fd_.get());
}

namespace {

constexpr size_t kPopulatedRanks = 64;  // largest world to populate; takes 32 MiB, by its square

}  // namespace

void Segment::populate(int rank, const std::vector<int>& peers) const {
#ifdef MADV_POPULATE_WRITE
  if (peers.size() > kPopulatedRanks) return;
  for (const int peer : peers) {
    if (peer == rank) continue;
    // Best effort: kernels before 5.14 do not support it, and the first message then pays for the
    // page fault.
    ::madvise(&channel(rank, peer), (sizeof(Channel) + 4095) / 4096 * 4096, MADV_POPULATE_WRITE);
    ::madvise(&channel(peer, rank), (sizeof(Channel) + 4095) / 4096 * 4096, MADV_POPULATE_WRITE);
  }
#else
  (void)rank;
  (void)peers;
#endif
}

namespace {

Layout layoutFor(int num_ranks) {
  if (num_ranks < 1 || num_ranks > 4096) {
    throwInvalidUsage("a shared-memory world has 1 to 4096 ranks, not " +
                      std::to_string(num_ranks));
  }
  size_t payload = Settings::get().shm_payload_bytes / 4096 * 4096;
  if (num_ranks > 256) payload = shm::kMinPayloadBytes;
  return Layout{static_cast<uint32_t>(num_ranks), static_cast<uint32_t>(payload)};
}

}  // namespace
}  // namespace shm

size_t shmSegmentBytes(int num_ranks) { return shm::layoutFor(num_ranks).totalBytes(); }

std::shared_ptr<ShmSegment> createShmSegment(int num_ranks) {
  const shm::Layout layout = shm::layoutFor(num_ranks);
  auto segment = std::make_shared<shm::Segment>(
      shm::createSharedFileAnywhere("hdpcomm", layout.totalBytes()), layout);
  segment->header() = shm::Header{shm::kMagic, layout.num_ranks, layout.payload_bytes};
  return segment;
}

std::shared_ptr<ShmSegment> openShmSegment(const std::string& address, int num_ranks) {
  int pid = 0;
  int remote_fd = 0;
  if (std::sscanf(address.c_str(), "%d:%d", &pid, &remote_fd) != 2) {
    throwInvalidUsage("'" + address + "' is not the address of a shared segment (pid:descriptor)");
  }
  const std::string who = "the shared segment of process " + std::to_string(pid);
  Fd fd;
  size_t bytes = 0;
  try {
    fd = shm::openSharedFile(pid, remote_fd, O_RDWR, &bytes);
  } catch (const Error& error) {
    throw Error(ErrorKind::kInternal, "cannot open " + who + " (" + error.what() +
                                          "): all ranks of the shm transport must run as the same "
                                          "user in one pid namespace");
  }
  // The creator chooses the payload size: the environments may differ.
  shm::Header header{};
  if (::pread(fd.get(), &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
      header.magic != shm::kMagic) {
    throwInvalidUsage(who + " is none of this version of hdpcomm");
  }
  if (header.num_ranks != static_cast<uint32_t>(num_ranks)) {
    throwInvalidUsage("the shared segment was made for " + std::to_string(header.num_ranks) +
                      " ranks, this rank expects " + std::to_string(num_ranks) +
                      ": start all ranks with the same world size");
  }
  const shm::Layout layout{header.num_ranks, header.payload_bytes};
  if (layout.payload_bytes < shm::kMinPayloadBytes || layout.payload_bytes % 4096 != 0 ||
      layout.totalBytes() != bytes) {
    throwInvalidUsage(who + " says that its channels have " + std::to_string(layout.payload_bytes) +
                      " bytes of payload, but has " + std::to_string(bytes) + " bytes for " +
                      std::to_string(num_ranks) + " ranks: it is none of this version of hdpcomm");
  }
  return std::make_shared<shm::Segment>(std::move(fd), layout);
}

std::string hostIdentity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat info{};
  HDP_SYS(::stat("/proc/self/ns/pid", &info));
  return boot + "/" + std::to_string(info.st_ino) + "/" + std::to_string(::getuid());
}

}  // namespace hdpcomm
