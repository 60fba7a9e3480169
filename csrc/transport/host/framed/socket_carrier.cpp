#include "transport/host/framed/socket_carrier.hpp"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "transport/host/framed/frame.hpp"

namespace hdpcomm {

using framed::Header;
using framed::Kind;

namespace {

constexpr size_t kTurnBytes = 2 << 20;  // of one connection, before others have their turn
constexpr uint64_t kOwnEvent = ~uint64_t{0};
constexpr int kEvents = 64;
constexpr size_t kStagedBytes = 16 * 1024;
constexpr auto kSettle = std::chrono::milliseconds(2);  // between looks at what is not acknowledged
// For a connection of the peer's that is being proven, when that to it has broken.
constexpr auto kLate = std::chrono::seconds(1);

std::string errorText(int error) { return std::strerror(error); }

uint64_t tagOf(int peer, bool incoming) {
  return static_cast<uint64_t>(peer) * 2 + (incoming ? 1 : 0);
}

// Where the byte `at` of a frame is, of those that are sent: the header's, then the payload's.
std::byte* placeOf(Frame& frame, size_t at) {
  return at < sizeof(Header) ? frame.head() + at : framed::payload(frame) + (at - sizeof(Header));
}

}  // namespace

SocketCarrier::SocketCarrier(std::shared_ptr<FrameLink> link, double grace_s)
    : link_(std::move(link)),
      grace_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace_s))),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(static_cast<size_t>(link_->size())),
      progress_(Clock::now()),
      taken_(peers_.size()) {
  if (epoll_.get() < 0 || event_.get() < 0) {
    throw Error(ErrorKind::kInternal, "epoll_create1() or eventfd() failed: " + errorText(errno));
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kOwnEvent;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &event) != 0) {
    throw Error(ErrorKind::kInternal, "epoll_ctl() failed: " + errorText(errno));
  }
  link_->setCarrierWake([this](int peer) {
    {
      std::lock_guard lock(mutex_);
      dirty_.push_back(peer);
    }
    ::eventfd_write(event_.get(), 1);
  });
  for (int peer = 0; peer < link_->size(); ++peer) {
    if (peer != link_->rank()) dirty_.push_back(peer);  // what was posted before
  }
  ::eventfd_write(event_.get(), 1);
  // Signals are for the program's threads.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

SocketCarrier::~SocketCarrier() {
  stop();
  if (thread_.joinable()) thread_.join();
}

void SocketCarrier::stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
  ::eventfd_write(event_.get(), 1);
}

std::optional<int> SocketCarrier::wanted() {
  std::unique_lock lock(mutex_);
  for_makers_.wait(lock, [&] { return ended_ || !wanted_.empty(); });
  if (ended_) return std::nullopt;
  const int peer = wanted_.front();
  wanted_.pop_front();
  return peer;
}

void SocketCarrier::connected(int peer, Fd socket) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  arrived_.push_back({peer, false, std::move(socket)});
  ::eventfd_write(event_.get(), 1);
}

void SocketCarrier::unreachable(int peer, const std::string& why) {
  std::lock_guard lock(mutex_);
  unreachable_.emplace_back(peer, why);
  ::eventfd_write(event_.get(), 1);
}

bool SocketCarrier::accepted(int peer, Fd socket) {
  std::lock_guard lock(mutex_);
  if (ended_ || taken_.at(static_cast<size_t>(peer))) return false;
  taken_[static_cast<size_t>(peer)] = true;
  arrived_.push_back({peer, true, std::move(socket)});
  ::eventfd_write(event_.get(), 1);
  return true;
}

bool SocketCarrier::join(double seconds) {
  {
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> time(seconds);
    if (!for_joiners_.wait_for(lock, time, [&] { return ended_; })) return false;
  }
  std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
  return true;
}

void SocketCarrier::run() {
  try {
    carry();
  } catch (const std::exception& error) {  // no memory, say: all peers are lost, the process is not
    loseAll(std::string("this rank cannot carry on: ") + error.what());
  }
  link_->setCarrierWake(nullptr);
  std::deque<Peer> ending;
  std::swap(ending, peers_);
  ending.clear();
  std::lock_guard lock(mutex_);
  ended_ = true;
  arrived_.clear();
  for_makers_.notify_all();
  for_joiners_.notify_all();
}

void SocketCarrier::loseAll(const std::string& why) noexcept {
  for (int peer = 0; peer < link_->size(); ++peer) {
    if (peer == link_->rank()) continue;
    try {
      link_->lost(peer, why);
    } catch (const std::exception&) {  // it is lost by its silence
    }
  }
}

void SocketCarrier::carry() {
  std::array<epoll_event, kEvents> events;
  bool closing = false;
  for (;;) {
    const int wait_ms = closing || broken_ > 0 ? static_cast<int>(kSettle.count()) : -1;
    const int count = ::epoll_wait(epoll_.get(), events.data(), kEvents, wait_ms);
    for (int i = 0; i < count; ++i) handle(events[i].data.u64, events[i].events);
    if (!takeHandedOver()) break;
    settleBroken();
    if (!closing && link_->closed()) {
      closing = true;
      progress_ = Clock::now();
    }
    if (closing && allSent()) break;
  }
}

void SocketCarrier::handle(uint64_t tag, uint32_t events) {
  if (tag == kOwnEvent) {
    eventfd_t count = 0;
    ::eventfd_read(event_.get(), &count);
    return;
  }
  const int rank = static_cast<int>(tag / 2);
  if (tag % 2 == 1) {
    receive(rank);
    return;
  }
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.out.socket.get() < 0) return;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) == 0) {
    send(rank);
    return;
  }
  // Nothing comes over it, so this is its end. What the peer sent before may still be read.
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(peer.out.socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  peer.why = error != 0 ? errorText(error) : "it closed the connection";
  peer.out.socket = Fd();
  peer.out.frame.reset();
  peer.out.ended = true;
  if (!peer.broken) ++broken_;
  peer.broken = Clock::now();
}

bool SocketCarrier::takeHandedOver() {
  std::vector<int> dirty;
  std::vector<Arrived> arrived;
  std::vector<std::pair<int, std::string>> unreachable;
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    dirty.swap(dirty_);
    arrived.swap(arrived_);
    unreachable.swap(unreachable_);
  }
  for (Arrived& each : arrived) {
    Peer& peer = peers_.at(static_cast<size_t>(each.peer));
    if (each.incoming) {
      peer.in.socket = std::move(each.socket);
      watch(each.peer, true, false, true);
    } else if (!peer.out.ended && peer.out.socket.get() < 0) {
      peer.out.socket = std::move(each.socket);
      progress_ = Clock::now();
      watch(each.peer, false, false, true);
      dirty.push_back(each.peer);
    }
  }
  for (const auto& [peer, why] : unreachable) lose(peer, why);
  std::ranges::sort(dirty);
  const auto same = std::ranges::unique(dirty);
  dirty.erase(same.begin(), same.end());
  for (const int peer : dirty) send(peer);
  return true;
}

void SocketCarrier::watch(int rank, bool incoming, bool writable, bool fresh) {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0U);
  event.data.u64 = tagOf(rank, incoming);
  const int socket = incoming ? peer.in.socket.get() : peer.out.socket.get();
  ::epoll_ctl(epoll_.get(), fresh ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, socket, &event);
}

void SocketCarrier::send(int rank) {
  Outgoing& out = peers_[static_cast<size_t>(rank)].out;
  size_t budget = kTurnBytes;
  bool full = false;
  while (!out.ended && !full && budget > 0) {
    if (!out.frame) {
      std::optional<FramePtr> next = link_->tryNext(rank);
      if (!next) break;
      out.frame = std::move(*next);
      out.sent = 0;
      out.ended = out.frame == nullptr;
      // Cut off by this rank: the peer sees it by its connections.
      if (const std::string loss = link_->lossOf(rank); out.ended && !loss.empty()) {
        lose(rank, loss);
      }
      continue;
    }
    const Header header = framed::readHeader(*out.frame);
    if (out.socket.get() < 0) {
      // A goodbye without a reason is not worth a connection: who wants one finds no listener.
      const bool idle = (header.kind == Kind::kGoodbye && header.piece == 0) ||
                        header.kind == Kind::kHeardGoodbye;
      if (idle && !out.asked) {
        out.frame.reset();
        continue;
      }
      if (!std::exchange(out.asked, true)) {
        std::lock_guard lock(mutex_);
        wanted_.push_back(rank);
        for_makers_.notify_one();
      }
      return;
    }
    const size_t total = sizeof(Header) + header.piece;
    std::array<iovec, 2> parts{};
    size_t count = 0;
    if (out.sent < sizeof(Header)) {
      parts[count++] = {placeOf(*out.frame, out.sent), sizeof(Header) - out.sent};
    }
    if (const size_t from = std::max(out.sent, sizeof(Header)); from < total) {
      parts[count++] = {placeOf(*out.frame, from), total - from};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t took = ::sendmsg(out.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (took < 0) {
      // What broke is told by the next event of the socket.
      full = errno != EINTR;
      continue;
    }
    progress_ = Clock::now();
    out.sent += static_cast<size_t>(took);
    budget -= std::min(budget, static_cast<size_t>(took));
    if (out.sent == total) out.frame.reset();
  }
  const bool more = out.socket.get() >= 0 && (full || budget == 0);
  if (std::exchange(out.armed, more) != more && out.socket.get() >= 0) {
    watch(rank, false, more, false);
  }
}

bool SocketCarrier::receive(int rank) {
  Incoming& in = peers_[static_cast<size_t>(rank)].in;
  size_t budget = kTurnBytes;
  while (in.socket.get() >= 0 && budget > 0) {
    // Large payloads go straight to their place.
    const bool direct =
        in.frame && in.got >= sizeof(Header) && in.expected - in.got >= kStagedBytes;
    in.staged.resize(kStagedBytes);
    std::byte* place = direct ? placeOf(*in.frame, in.got) : in.staged.data();
    const size_t room = direct ? in.expected - in.got : kStagedBytes;
    const ssize_t took = ::recv(in.socket.get(), place, room, MSG_DONTWAIT);
    if (took < 0 && errno == EINTR) continue;
    if (took < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (took <= 0) {
      lose(rank, took == 0 ? "it closed the connection" : errorText(errno));
      return true;
    }
    const auto bytes = static_cast<size_t>(took);
    budget -= std::min(budget, bytes);
    if (!direct) {
      if (!useStaged(rank, bytes)) return true;
      continue;
    }
    in.got += bytes;
    if (in.got == in.expected && !deliver(rank)) return true;
  }
  return in.socket.get() < 0;
}

bool SocketCarrier::useStaged(int rank, size_t bytes) {
  Incoming& in = peers_[static_cast<size_t>(rank)].in;
  for (size_t used = 0; used < bytes;) {
    if (!in.frame) {
      in.frame = std::make_shared<Frame>();
      in.got = 0;
      in.expected = sizeof(Header);
    }
    const size_t part = std::min(bytes - used, in.expected - in.got);
    std::memcpy(placeOf(*in.frame, in.got), in.staged.data() + used, part);
    used += part;
    in.got += part;
    if (in.got < in.expected) continue;
    if (in.got == sizeof(Header)) {
      try {
        in.frame->expectBulk();
      } catch (const Error& error) {
        lose(rank, error.what());
        return false;
      }
      in.expected += framed::readHeader(*in.frame).piece;
    }
    if (in.got == in.expected && !deliver(rank)) return false;
  }
  return true;
}

bool SocketCarrier::deliver(int rank) {
  Incoming& in = peers_[static_cast<size_t>(rank)].in;
  if (link_->deliver(rank, std::exchange(in.frame, nullptr))) return true;
  in.socket = Fd();
  return false;
}

// A peer that has ended closes both connections, in whatever order: what it sent comes first.
void SocketCarrier::settleBroken() {
  for (int rank = 0; broken_ > 0 && rank < link_->size(); ++rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (!peer.broken) continue;
    bool connected = false;
    {
      std::lock_guard lock(mutex_);
      const bool coming = std::ranges::any_of(
          arrived_, [&](const Arrived& each) { return each.incoming && each.peer == rank; });
      connected = taken_[static_cast<size_t>(rank)] && !coming;
    }
    const bool over = connected ? receive(rank) : Clock::now() - *peer.broken > kLate;
    if (over) lose(rank, std::string(peer.why));
  }
}

void SocketCarrier::lose(int rank, const std::string& why) {
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (std::exchange(peer.broken, std::nullopt)) --broken_;
  peer.out.socket = Fd();
  peer.in.socket = Fd();
  peer.out.frame.reset();
  peer.out.ended = true;
  link_->lost(rank, why);
}

// Also true when nothing has gone out, or has been acknowledged, for the time of grace.
bool SocketCarrier::allSent() {
  bool all = true;
  for (int rank = 0; rank < link_->size(); ++rank) {
    if (rank == link_->rank()) continue;
    send(rank);
    Outgoing& out = peers_[static_cast<size_t>(rank)].out;
    all = all && out.ended;
    int bytes = 0;
    if (out.socket.get() >= 0 && ::ioctl(out.socket.get(), SIOCOUTQ, &bytes) == 0) {
      if (bytes < out.unacknowledged) progress_ = Clock::now();
      out.unacknowledged = bytes;
    }
    all = all && bytes == 0;
  }
  return all || Clock::now() - progress_ > grace_;
}

}  // namespace hdpcomm
