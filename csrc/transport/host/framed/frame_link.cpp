#include "transport/host/framed/frame_link.hpp"

#include <algorithm>

#include "transport/host/framed/frame_check.hpp"

namespace hdpcomm {

using framed::Header;
using framed::Kind;

namespace {

constexpr auto kPingAfter = std::chrono::seconds(1);  // without a frame from the peer

}  // namespace

size_t Frame::expectBulk() {
  const Header header = framed::readHeader(*this);
  if (header.magic != framed::kMagic || header.piece > kFrameBulkBytes) {
    throw Error(ErrorKind::kInternal,
                "received bytes that are no frame of this version of hdpcomm: install the same "
                "version on all hosts");
  }
  if (header.piece > framed::kInlineBytes) allocate(header.piece);
  return bulk_bytes_;
}

FrameLink::FrameLink(int rank, int size)
    : rank_(rank), peers_(static_cast<size_t>(std::max(size, 0))) {
  if (size < 1 || size > 4096 || rank < 0 || rank >= size) {
    throwInvalidUsage("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      " was given; a world has 1 to 4096 ranks");
  }
}

void FrameLink::signal(std::unique_lock<std::mutex>& lock) {
  ++events_;
  const auto wake = wake_;
  lock.unlock();
  for_transport_.notify_all();
  if (wake) (*wake)();
}

FramePtr FrameLink::next(int peer_rank) {
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  peer.for_carrier.wait(lock, [&] {
    return !peer.outbox.empty() || peer.ping_due || peer.pong_due || closed_ || !peer.loss.empty();
  });
  if (!peer.loss.empty()) return nullptr;
  if (peer.ping_due || peer.pong_due) {
    Header header;
    header.kind = peer.pong_due ? Kind::kPong : Kind::kPing;
    (peer.pong_due ? peer.pong_due : peer.ping_due) = false;
    return framed::makeFrame(header, nullptr);
  }
  if (peer.outbox.empty()) return nullptr;  // closed
  FramePtr frame = std::move(peer.outbox.front());
  peer.outbox.pop_front();
  signal(lock);
  return frame;
}

bool FrameLink::deliver(int peer_rank, FramePtr frame) {
  if (const auto wrong = framed::badFrame(*frame, size())) {
    cutOff(peer_rank, *wrong);
    return false;
  }
  const Kind kind = framed::readHeader(*frame).kind;
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  if (peer.ended || !peer.loss.empty()) return false;
  peer.last_heard = Clock::now();
  peer.awaits_pong = false;
  if (kind == Kind::kPing) {
    peer.pong_due = true;
    lock.unlock();
    peer.for_carrier.notify_all();
    return true;
  }
  if (kind == Kind::kPong) return true;
  peer.ended = kind == Kind::kGoodbye;
  const bool ended = peer.ended;
  arrivals_.push_back({peer_rank, std::move(frame)});
  signal(lock);
  return !ended;
}

void FrameLink::waitClosed() {
  std::unique_lock lock(mutex_);
  for_transport_.wait(lock, [&] { return closed_; });
}

void FrameLink::lost(int peer_rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  lose(lock, peer,
       "was lost: " + (why.empty() ? "the connection broke" : why) +
           " (its process or its host died, or the network between them)");
}

void FrameLink::cutOff(int peer_rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  lose(lock, peers_.at(static_cast<size_t>(peer_rank)), "was cut off: " + why);
}

void FrameLink::lose(std::unique_lock<std::mutex>& lock, Peer& peer, const std::string& what) {
  if (peer.ended || !peer.loss.empty()) return;
  peer.loss = what;
  peer.for_carrier.notify_all();
  signal(lock);
}

void FrameLink::post(int peer_rank, FramePtr frame) {
  std::unique_lock lock(mutex_);
  if (closed_) return;
  if (peer_rank == rank_) {
    arrivals_.push_back({peer_rank, std::move(frame)});
    signal(lock);
    return;
  }
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  if (!peer.loss.empty()) return;
  peer.outbox.push_back(std::move(frame));
  lock.unlock();
  peer.for_carrier.notify_all();
}

bool FrameLink::hasRoom(int peer) const {
  std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)].outbox.size() < framed::kOutboxFrames;
}

void FrameLink::collect(std::vector<Arrival>& arrivals) {
  std::lock_guard lock(mutex_);
  for (Arrival& arrival : arrivals_) arrivals.push_back(std::move(arrival));
  arrivals_.clear();
}

std::string FrameLink::lossOf(int peer) const {
  std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)].loss;
}

double FrameLink::silence(int peer_rank) {
  if (peer_rank == rank_) return 0;
  std::unique_lock lock(mutex_);
  Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  const auto now = Clock::now();
  if (peer.awaits_pong) return std::chrono::duration<double>(now - peer.ping_time).count();
  if (now - peer.last_heard < kPingAfter || closed_) return 0;
  peer.awaits_pong = true;
  peer.ping_time = now;
  peer.ping_due = true;
  lock.unlock();
  peer.for_carrier.notify_all();
  return 0;
}

void FrameLink::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (Peer& peer : peers_) peer.for_carrier.notify_all();
  signal(lock);
}

uint32_t FrameLink::ticket() const {
  std::lock_guard lock(mutex_);
  return events_;
}

void FrameLink::wait(uint32_t ticket, Clock::time_point until) {
  std::unique_lock lock(mutex_);
  for_transport_.wait_until(lock, until, [&] { return events_ != ticket; });
}

void FrameLink::wake() {
  std::unique_lock lock(mutex_);
  signal(lock);
}

void FrameLink::setWake(std::function<void()> wake) {
  std::lock_guard lock(mutex_);
  wake_ = std::make_shared<const std::function<void()>>(std::move(wake));
}

}  // namespace hdpcomm
