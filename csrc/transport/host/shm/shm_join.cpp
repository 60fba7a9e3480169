// Joining: the ranks of a segment wait for each other.
#include <sched.h>
#include <sys/uio.h>

#include <thread>

#include "base/process.hpp"
#include "base/settings.hpp"
#include "transport/host/shm/shm_transport.hpp"

namespace hdpcomm {
namespace shm {
namespace {

// The number of cores on which at least one of the processes may run.
int coresOf(const std::vector<int>& pids) {
  cpu_set_t all;
  CPU_ZERO(&all);
  for (const int pid : pids) {
    cpu_set_t own;
    CPU_ZERO(&own);
    if (::sched_getaffinity(pid, sizeof own, &own) == 0) CPU_OR(&all, &all, &own);
  }
  return CPU_COUNT(&all);
}

}  // namespace

void ShmTransport::waitAllReady(const ShmJoining& joining) {
  try {
    waitForMembers(joining);
  } catch (const Error& error) {
    close(error.what());
    throw;
  } catch (...) {
    close("it was interrupted while it joined");
    throw;
  }
  std::vector<int> pids;
  for (const int member : members_) {
    probePeer(peers_[member]);
    pids.push_back(peers_[member].control->pid);
  }
  oversubscribed_ = static_cast<int>(members_.size()) > coresOf(pids);
}

bool ShmTransport::present(int member) const {
  // Acquire: the member's description of itself was written before its state.
  return peers_[member].control->state.load(std::memory_order_acquire) != RankState::kAbsent;
}

void ShmTransport::waitForMembers(const ShmJoining& joining) {
  const auto seconds = [](double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
  };
  const auto deadline = Clock::now() + seconds(std::min(joining.timeout_s, 1e9));
  const auto liveness = seconds(Settings::get().liveness_s);
  auto next_check = Clock::now() + liveness;
  for (const int member : members_) {
    while (!present(member)) {
      const auto now = Clock::now();
      if (now >= next_check) {
        next_check = now + liveness;
        if (joining.check) joining.check();
        if (const auto lost = lostInJoining(joining)) throw Error(*lost);
      }
      if (now > deadline) {
        std::string absent;
        for (const int other : members_) {
          if (!present(other)) absent += " " + std::to_string(other);
        }
        // kLate, not kClosed: the others report the absent ranks themselves.
        segment_->control(rank_).state.store(RankState::kLate, std::memory_order_release);
        throw Error(ErrorKind::kTimeout,
                    "ranks" + absent + " did not join the shared-memory world within " +
                        std::to_string(joining.timeout_s) +
                        " s: look for their errors, or raise timeout=",
                    {.rank = rank_, .peer = member, .op = "init", .ranks = {}, .seq = -1});
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

// The error of a member that can no longer join. Only called while some member is absent, so a
// member that has closed by then has given up.
std::optional<Error> ShmTransport::lostInJoining(const ShmJoining& joining) const {
  for (const int member : members_) {
    if (member == rank_) continue;
    const Control& control = *peers_[member].control;
    const RankState state = control.state.load(std::memory_order_acquire);
    const int pid = static_cast<size_t>(member) < joining.pids.size() ? joining.pids[member] : 0;
    std::string what;
    if (state == RankState::kClosed) {
      what = "gave up" + closingReason(control);
    } else if (state == RankState::kReady && !processAlive(control)) {
      what = "died (process " + std::to_string(control.pid) + ")";
    } else if (state == RankState::kAbsent && pid != 0 && !processRuns(pid)) {
      what = "died (process " + std::to_string(pid) + ")";
    } else {
      continue;
    }
    return Error(ErrorKind::kPeerLost,
                 "rank " + std::to_string(member) + " " + what +
                     " while the ranks joined the shared-memory world: look for its error",
                 {.rank = rank_, .peer = member, .op = "init", .ranks = {}, .seq = -1});
  }
  return std::nullopt;
}

// Finds out how to read the memory of a peer that has joined.
void ShmTransport::probePeer(Peer& peer) {
  peer.same_process = peer.control->pid == segment_->control(rank_).pid;
  (void)processAlive(*peer.control);  // opens its descriptor, as long as there are some
  uint64_t value = 0;
  bool readable = peer.same_process;
  if (!readable && Settings::get().shm_cma) {
    iovec local{&value, sizeof value};
    iovec remote{reinterpret_cast<void*>(peer.control->probe), sizeof value};
    readable = ::process_vm_readv(peer.control->pid, &local, 1, &remote, 1, 0) == sizeof value &&
               value == kMagic;
  }
  peer.in->direct_allowed.store(readable ? 1 : 0, std::memory_order_release);
}

}  // namespace shm

void shmWaitAllReady(Transport& transport, const ShmJoining& joining) {
  dynamic_cast<shm::ShmTransport&>(transport).waitAllReady(joining);
}

}  // namespace hdpcomm
