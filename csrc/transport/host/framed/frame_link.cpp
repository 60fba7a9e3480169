#include "transport/host/framed/frame_link.hpp"

#include <algorithm>
#include <utility>

#include "base/settings.hpp"
#include "transport/host/framed/frame_check.hpp"

namespace hdpcomm {

using framed::Header;
using framed::Kind;

namespace {

// Pings tell how old the peer's last move is, so they follow the health checks.
Clock::duration pingAfter() {
  const std::chrono::duration<double> seconds(std::min(1.0, 5 * Settings::get().liveness_s));
  return std::chrono::duration_cast<Clock::duration>(seconds);
}

uint64_t ageMs(Clock::time_point time, Clock::time_point now) {
  const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(now - time).count();
  return static_cast<uint64_t>(std::clamp<int64_t>(age, 0, kOldestMoveMs));
}

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
    : rank_(rank), peers_(static_cast<size_t>(std::max(size, 0))), ping_after_(pingAfter()) {
  if (size < 1 || size > 4096 || rank < 0 || rank >= size) {
    throwInvalidUsage("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      " was given; a world has 1 to 4096 ranks");
  }
  for (int each = 0; each < size; ++each) peers_[static_cast<size_t>(each)].rank = each;
}

void FrameLink::signal(std::unique_lock<std::mutex>& lock) {
  ++events_;
  const auto wake = wake_;
  lock.unlock();
  for_transport_.notify_all();
  if (wake) (*wake)();
}

bool FrameLink::isReady(const Peer& peer) const {
  return !peer.outbox.empty() || peer.ping_due || peer.pong_due || answerDue(peer) ||
         fetchDue(peer) || peer.heard_due || closed_ || !peer.loss.empty();
}

void FrameLink::wakeCarrier(Peer& peer) {
  if (carrier_wake_) carrier_wake_(peer.rank);
}

void FrameLink::setCarrierWake(std::function<void(int)> wake) {
  std::lock_guard lock(mutex_);
  carrier_wake_ = std::move(wake);
}

std::optional<FramePtr> FrameLink::tryNext(int peer_rank) {
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  if (!isReady(peer)) return std::nullopt;
  if (!peer.loss.empty()) return FramePtr();
  if (std::exchange(peer.heard_due, false)) {
    Header header;
    header.kind = Kind::kHeardGoodbye;
    return framed::makeFrame(header, nullptr);
  }
  if (peer.ping_due || peer.pong_due) {
    if (std::exchange(peer.pong_due, false)) return makePong(peer);
    peer.ping_due = false;
    Header header;
    header.kind = Kind::kPing;
    header.number = peer.ping;
    return framed::makeFrame(header, nullptr);
  }
  if (answerDue(peer)) return makeAnswer(peer);
  if (fetchDue(peer)) return makeFetch(peer);
  if (peer.outbox.empty()) return FramePtr();  // closed
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
  const Header header = framed::readHeader(*frame);
  const Kind kind = header.kind;
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  if (peer.ended || !peer.loss.empty()) return false;
  peer.last_heard = Clock::now();
  if (kind == Kind::kPing) {
    peer.pong_due = true;
    peer.peers_ping = header.number;
    wakeCarrier(peer);
    return true;
  }
  if (kind == Kind::kPong) {
    if (header.number == peer.ping) takePong(peer_rank, peer, *frame);
    return true;
  }
  if (kind == Kind::kHeardGoodbye) {
    if (!peer.said_goodbye) lose(lock, peer, "was cut off: it heard a goodbye that nobody said");
    return false;
  }
  if (kind == Kind::kFetch || kind == Kind::kFetched) {
    const auto wrong = kind == Kind::kFetch ? takeFetch(peer, *frame) : takeAnswer(peer, *frame);
    if (!wrong.empty()) {
      lose(lock, peer, "was cut off: " + wrong);
      return false;
    }
    wakeCarrier(peer);
    return true;
  }
  // The transport looks at the window when it takes the frames, which its rank may do much later.
  peer.waiting_units += header.piece + framed::kPieceUnits;
  if (peer.waiting_units > framed::kWindow + framed::kControlFrames * framed::kPieceUnits) {
    lose(lock, peer,
         "was cut off: it sent more than may be under way (" + std::to_string(peer.waiting_units) +
             " units)");
    return false;
  }
  peer.last_moved = peer.last_heard;
  peer.ended = kind == Kind::kGoodbye;
  const bool ended = peer.ended;
  if (ended) {
    peer.heard_due = true;
    wakeCarrier(peer);
    for_fetches_.notify_all();
  }
  arrivals_.push_back({peer_rank, std::move(frame)});
  signal(lock);
  return !ended;
}

bool FrameLink::closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void FrameLink::lost(int peer_rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  if (peer.ended) return;
  lose(lock, peer,
       "was lost: " + (why.empty() ? "the connection broke" : why) +
           " (its process or its host died, or the network between them)");
}

void FrameLink::cutOff(int peer_rank, const std::string& why) {
  std::unique_lock lock(mutex_);
  lose(lock, peers_.at(static_cast<size_t>(peer_rank)), "was cut off: " + why);
}

void FrameLink::lose(std::unique_lock<std::mutex>& lock, Peer& peer, const std::string& what) {
  if (!peer.loss.empty()) return;
  peer.loss = what;
  wakeCarrier(peer);
  for_fetches_.notify_all();
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
  const Kind kind = framed::readHeader(*frame).kind;
  peer.said_goodbye = kind == Kind::kGoodbye;
  if (kind == Kind::kCredit) {  // the peer may be waiting for it, and its order does not matter
    peer.outbox.push_front(std::move(frame));
  } else {
    peer.outbox.push_back(std::move(frame));
  }
  wakeCarrier(peer);
}

bool FrameLink::hasRoom(int peer) const {
  std::lock_guard lock(mutex_);
  return peers_[static_cast<size_t>(peer)].outbox.size() < framed::kOutboxFrames;
}

void FrameLink::collect(std::vector<Arrival>& arrivals) {
  std::lock_guard lock(mutex_);
  for (Arrival& arrival : arrivals_) {
    peers_[static_cast<size_t>(arrival.peer)].waiting_units = 0;
    arrivals.push_back(std::move(arrival));
  }
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
  if (peer.awaits_pong) {
    return std::chrono::duration<double>(now - std::max(peer.ping_time, peer.last_heard)).count();
  }
  // A ping of the peer's tells nothing about its moves: to be asked is no reason not to ask.
  if (now - std::max(peer.last_answer, peer.last_moved) < ping_after_ || closed_) return 0;
  peer.awaits_pong = true;
  peer.ping_time = now;
  peer.ping_due = true;
  ++peer.ping;
  wakeCarrier(peer);
  return 0;
}

void FrameLink::publishPulse(const Pulse& pulse) {
  std::lock_guard lock(mutex_);
  own_pulse_ = pulse;
}

// Ages instead of times, since each host has its own clock.
FramePtr FrameLink::makePong(const Peer& peer) const {
  Header header;
  header.kind = Kind::kPong;
  header.number = peer.peers_ping;
  if (!own_pulse_) return framed::makeFrame(header, nullptr);
  const auto now = Clock::now();
  header.detail = framed::kHasPulse;
  header.cause = static_cast<int16_t>(own_pulse_->culprit);
  header.index = ageMs(own_pulse_->moved, now);
  header.offset = ageMs(own_pulse_->culprit_moved, now);
  header.piece = static_cast<uint32_t>(std::min(own_pulse_->doing.size(), kPulseText));
  return framed::makeFrame(header, own_pulse_->doing.data());
}

// The peer made its answer after the ping was asked for, so its last move was not before that time
// less the age. To go by this time, and not by that of the arrival, keeps ranks that wait for each
// other in a circle from making each other's moves later with each answer.
void FrameLink::takePong(int peer_rank, Peer& peer, Frame& frame) {
  peer.awaits_pong = false;
  peer.last_answer = peer.last_heard;
  const Header header = framed::readHeader(frame);
  if (header.detail != framed::kHasPulse) return;
  const auto before = [&](uint64_t age) {
    return peer.ping_time - std::chrono::milliseconds(static_cast<int64_t>(age));
  };
  peer.pulse =
      Pulse{before(header.index), before(header.offset), header.cause,
            pulseText(reinterpret_cast<const char*>(framed::payload(frame)), header.piece)};
  if (peer.pulse->culprit < 0) peer.pulse->culprit = peer_rank;
}

std::optional<Pulse> FrameLink::pulse(int peer_rank) const {
  std::lock_guard lock(mutex_);
  const Peer& peer = peers_[static_cast<size_t>(peer_rank)];
  std::optional<Pulse> pulse = peer.pulse;
  if (pulse) pulse->moved = std::max(pulse->moved, peer.last_moved);
  return pulse;
}

void FrameLink::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  for (Peer& peer : peers_) wakeCarrier(peer);
  for_fetches_.notify_all();
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
