#include "transport/host/shm/shm_transport.hpp"

#include <linux/membarrier.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "base/futex.hpp"
#include "base/process.hpp"
#include "base/settings.hpp"

namespace hdpcomm {
namespace shm {
namespace {

// Other ranks read it to find out whether the kernel lets them read this process's memory.
const uint64_t kProbeWord = kMagic;

long membarrier(int command) noexcept { return ::syscall(SYS_membarrier, command, 0, 0); }

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<Segment> segment, int rank, std::vector<int> members)
    : segment_(std::move(segment)),
      rank_(rank),
      members_(std::move(members)),
      eager_bytes_(Settings::get().shm_eager_bytes) {
  const int num_ranks = size();
  if (rank < 0 || rank >= num_ranks) {
    throwInvalidUsage("rank " + std::to_string(rank) + " is not in a world of " +
                      std::to_string(num_ranks) + " ranks");
  }
  eager_bytes_ = std::min<size_t>(eager_bytes_, segment_->layout().payload_bytes / 4);
  if (members_.empty()) {
    members_.resize(static_cast<size_t>(num_ranks));
    std::iota(members_.begin(), members_.end(), 0);
  }
  peers_.resize(num_ranks);
  for (int i = 0; i < num_ranks; ++i) {
    Peer& peer = peers_[i];
    peer.rank = i;
    peer.failures.connect(rank, i);
    peer.control = &segment_->control(i);
    peer.out = &segment_->channel(rank, i);
    peer.in = &segment_->channel(i, rank);
    peer.out_payload = segment_->payload(rank, i);
    peer.in_payload = segment_->payload(i, rank);
  }
  Control& own = segment_->control(rank);
  if (own.state.load(std::memory_order_acquire) != RankState::kAbsent) {
    throwInvalidUsage("rank " + std::to_string(rank) +
                      " has joined this world before: ranks must differ");
  }
  segment_->populate(rank, members_);
  own.pid = ::getpid();
  own.start_time = ownStartTime();
  // Peers read this process's memory; Yama allows that to nobody but a parent. Fails where there is
  // no Yama; then it is not needed.
  if (Settings::get().shm_cma) ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  own.probe = reinterpret_cast<uint64_t>(&kProbeWord);
  own.heap_descriptor.store(-1, std::memory_order_relaxed);
  barriers_ = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0;
  own.barrier_by_sleeper.store(barriers_ ? 1 : 0, std::memory_order_relaxed);
  own.state.store(RankState::kReady, std::memory_order_release);
}

ShmTransport::~ShmTransport() { close("the communicator was destroyed"); }

bool ShmTransport::progress() {
  bool moved = false;
  for (size_t i = 0; i < active_.size();) {
    Peer& peer = peers_[active_[i]];
    if (!peer.active()) {  // idle for a whole call; dropped late, as most are soon active again
      peer.in_active_list = false;
      active_[i] = active_.back();
      active_.pop_back();
      continue;
    }
    if (!peer.inflight.empty() &&
        peer.out->consumed.load(std::memory_order_relaxed) != peer.consumed_seen) {
      completeInflight(peer);
      moved = true;
    }
    moved |= drain(peer);
    while (!peer.queue.empty() && tryPush(peer, peer.queue.front())) {
      peer.queue.pop();
      moved = true;
    }
    ++i;
  }
  return moved;
}

void ShmTransport::cancel(const Completion* completion) {
  for (const int rank : active_) {
    Peer& peer = peers_[rank];
    peer.queue.filter(
        [&](const PendingSend& send) { return send.request.completion != completion; });
    peer.inflight.filter([&](const Inflight& inflight) {
      if (inflight.request.completion != completion) return true;
      withdraw(peer, inflight);
      return false;
    });
    peer.resync.cancel(completion);
    if (!peer.recvs.empty() && peer.recvs.front().completion == completion)
      peer.fragment_offset = 0;
    peer.recvs.filter([&](const RecvRequest& request) { return request.completion != completion; });
  }
}

std::vector<int> ShmTransport::awaited(const Completion* completion) {
  std::vector<int> ranks;
  for (const int rank : active_) {
    if (holdsRequestOf(peers_[rank], completion)) ranks.push_back(rank);
  }
  return ranks;
}

void ShmTransport::notifyFailure(int peer_rank, const Error& error,
                                 std::optional<uint32_t> first_send,
                                 std::optional<uint32_t> send_number,
                                 std::optional<uint32_t> recv_number) {
  Peer& peer = peers_[peer_rank];
  completeAccepted(peer);
  if (first_send) revoke(peer, *first_send);
  const auto notice = peer.failures.giveUp(error, {send_number, recv_number}, first_send,
                                           peer.recvs, peer.inflight, peer.queue);
  if (!notice || peer_rank == rank_) return;
  // It overtakes the messages that wait for room: all of them have failed.
  const auto control = [](const PendingSend& each) { return each.kind >= Kind::kFailure; };
  if (!peer.queue.any(control) && pushFailure(peer, *notice)) return;
  PendingSend send;
  send.kind = Kind::kFailure;
  send.notice = *notice;
  queueNotice(peer.queue, std::move(send), send_number);
  activate(peer);
}

void ShmTransport::postResync(int peer_rank, Completion* completion) {
  Peer& peer = peers_[peer_rank];
  peer.fragment_offset = 0;
  activate(peer);
  sendMarker(peer, peer.resync.begin(completion));
}

void ShmTransport::sendMarker(Peer& peer, const Marker& marker) {
  if (peer.queue.empty() && pushMarker(peer, marker)) return;
  PendingSend send;
  send.kind = Kind::kMarker;
  send.marker = marker;
  peer.queue.push(std::move(send));
  activate(peer);
}

bool ShmTransport::processAlive(const Control& control) const {
  if (control.pid == segment_->control(rank_).pid) return true;
  return hdpcomm::processAlive(control.pid, control.start_time);
}

std::string ShmTransport::closingReason(const Control& control) const {
  if (control.reason_ready.load(std::memory_order_acquire) == 0) return "";
  return std::string("; its last words: ") + readText(control.reason, kFailureText);
}

void ShmTransport::cutOff(Peer& peer, const char* field, uint64_t value) {
  if (!peer.broken.empty()) return;
  peer.broken = std::string("the ") + field + " of its message is " + std::to_string(value) +
                ", which no rank of this version of hdpcomm writes";
  peer.dead = std::make_unique<Channel>();
  peer.dead->consumed.store(peer.sent - kSlots, std::memory_order_relaxed);
  peer.consumed_seen = peer.sent - kSlots;
  peer.out = peer.in = peer.dead.get();
  peer.failures.failAll(*goneError(peer), peer.recvs, peer.inflight, peer.queue);
}

std::optional<Error> ShmTransport::goneError(const Peer& peer, bool awaited) const {
  if (!peer.broken.empty()) {
    return Error(ErrorKind::kPeerLost,
                 "rank " + std::to_string(peer.rank) + " was cut off: " + peer.broken,
                 {.rank = rank_, .peer = peer.rank, .op = {}, .ranks = {}, .seq = -1});
  }
  const RankState state = peer.control->state.load(std::memory_order_acquire);
  const bool closed = state == RankState::kClosed || state == RankState::kLate;
  if (!closed && processAlive(*peer.control)) return std::nullopt;
  const std::string who = "rank " + std::to_string(peer.rank) +
                          (closed ? " closed its communicator"
                                  : " died (process " + std::to_string(peer.control->pid) + ")");
  const std::string when =
      awaited ? " while rank " + std::to_string(rank_) + " waited for it" : std::string();
  return Error(ErrorKind::kPeerLost, who + when + closingReason(*peer.control),
               {.rank = rank_, .peer = peer.rank, .op = {}, .ranks = {}, .seq = -1});
}

std::optional<Error> ShmTransport::departure(int peer) {
  return peer == rank_ ? std::nullopt : goneError(peers_[peer], false);
}

void ShmTransport::checkPeers() {
  for (const int rank : active_) {
    Peer& peer = peers_[rank];
    const auto gone = goneError(peer);
    if (!gone) continue;
    // Messages that the peer sent before it left are still valid.
    completeInflight(peer);
    drain(peer);
    peer.resync.fail(*gone);
    peer.failures.failAll(*gone, peer.recvs, peer.inflight, peer.queue);
  }
}

std::optional<Error> ShmTransport::lost(int peer_rank, std::optional<uint32_t> send_number,
                                        std::optional<uint32_t> recv_number, bool needed) {
  Peer& peer = peers_[peer_rank];
  const auto gone = needed ? goneError(peer) : std::nullopt;
  drain(peer);
  return peer.failures.lost(send_number, recv_number, needed, gone, [&] {
    return noticeAhead(
        peer, [&](const Notice& notice) { return notice.concerns(send_number, recv_number); });
  });
}

// Wakes the rank if it sleeps.
void ShmTransport::ringDoorbell(Control& control) {
  // The publication comes before the check of `sleepers`, and a sleeper registers before its last
  // check of the channels (idleTicket), so that one of the two sees the other. A fence here would
  // stall every message until its cache line has arrived; where the kernel allows it, the sleeper
  // makes this core execute one instead (membarrier), and only the compiler is constrained here.
  if (barriers_ && control.barrier_by_sleeper.load(std::memory_order_relaxed) != 0) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  if (control.sleepers.load(std::memory_order_relaxed) == 0) return;
  control.doorbell.fetch_add(1, std::memory_order_release);
  futexWakeAll(control.doorbell);
}

uint32_t ShmTransport::idleTicket() {
  Control& own = segment_->control(rank_);
  own.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t ticket = own.doorbell.load(std::memory_order_acquire);
  if (barriers_) membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return ticket;
}

void ShmTransport::idle(uint32_t ticket, Clock::time_point until) {
  Control& own = segment_->control(rank_);
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now());
  if (left.count() > 0) futexWait(own.doorbell, ticket, left);
  own.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

std::function<void()> ShmTransport::waker() {
  return [segment = segment_, rank = rank_] {
    // As in ringDoorbell(): the caller's event comes before the check of `sleepers`.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    Control& own = segment->control(rank);
    if (own.sleepers.load(std::memory_order_relaxed) == 0) return;
    own.doorbell.fetch_add(1, std::memory_order_release);
    futexWakeAll(own.doorbell);
  };
}

std::shared_ptr<std::byte> ShmTransport::allocate(size_t bytes) {
  if (no_heap_) return nullptr;
  if (!heap_) {
    try {
      heap_ = Heap::create();
    } catch (const Error&) {
      // So much address space is not allowed (ulimit -v), or no memory file: ordinary memory is as
      // good, only slower.
      no_heap_ = true;
      return nullptr;
    }
    Control& own = segment_->control(rank_);
    own.heap_base = reinterpret_cast<uint64_t>(heap_->base());
    own.heap_descriptor.store(heap_->descriptor(), std::memory_order_release);
  }
  return heap_->allocate(bytes);
}

uint64_t ShmTransport::moves() const {
  uint64_t sum = 0;
  for (const Peer& peer : peers_) sum += peer.sent + peer.consumed_seen + peer.received;
  return sum;
}

void ShmTransport::publishPulse(const Pulse& pulse) {
  segment_->control(rank_).pulse.record.write(recordOf(pulse));
}

// The last one that was read in whole, if the peer writes at this moment, or stopped while it did.
std::optional<Pulse> ShmTransport::pulse(int peer_rank) {
  Peer& peer = peers_[peer_rank];
  PulseRecord record;
  const auto& place = peer.control->pulse.record;
  if (place.count() > 0 && place.read(record)) peer.pulse = record;
  if (!peer.pulse) return std::nullopt;
  return pulseOf(*peer.pulse, peer_rank, size(), Clock::now());
}

Stats ShmTransport::stats() const {
  const auto used = [](const Peer& peer) { return peer.used; };
  return stats_.named(static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), used)));
}

void ShmTransport::close(const std::string& reason) noexcept {
  if (closed_) return;
  closed_ = true;
  Control& own = segment_->control(rank_);
  if (own.pid != ::getpid()) return;  // in a forked child: the rank is the parent
  if (!reason.empty()) {
    try {
      writeText(own.reason, kFailureText, reason);
      own.reason_ready.store(1, std::memory_order_release);
    } catch (const std::bad_alloc&) {  // then without a reason
    }
  }
  const bool late = own.state.load(std::memory_order_relaxed) == RankState::kLate;
  if (!late) own.state.store(RankState::kClosed, std::memory_order_release);
  for (const int member : members_) ringDoorbell(*peers_[member].control);
}

}  // namespace shm

std::unique_ptr<Transport> makeShmTransport(std::shared_ptr<ShmSegment> segment, int rank,
                                            std::vector<int> members) {
  return std::make_unique<shm::ShmTransport>(
      std::dynamic_pointer_cast<shm::Segment>(std::move(segment)), rank, std::move(members));
}

}  // namespace hdpcomm
