#include "comm/stream/host_board.hpp"

#include <chrono>
#include <numeric>
#include <thread>

namespace hdpcomm {
namespace {

using device::BoardState;
using device::CallEntry;
using std::chrono::milliseconds;

constexpr auto kStateInterval = milliseconds(50);
constexpr auto kLeaveTimeout = std::chrono::seconds(2);
// "board"; keeps a message of the program from being taken for an entry of the same call.
constexpr uint64_t kBoardHash = 0x626f617264ULL;

// One entry to or from a peer. Its call is the entry's, so that the world compares it.
class EntryWork final : public Work {
 public:
  EntryWork(const Ranks& ranks, CallEntry& entry, int peer, bool sent)
      : Work(entry.call, ranks), entry_(entry), peer_(peer), sent_(sent) {
    call_.subset_hash ^= kBoardHash;
  }

 protected:
  void takeNumbers(Transport& transport) override {
    Numbers numbers{peer_, {}, {}};
    (sent_ ? numbers.send : numbers.recv) =
        sent_ ? transport.nextSendNumber(peer_) : transport.nextRecvNumber(peer_);
    numbers_.push_back(numbers);
  }
  bool advance(Transport& transport) override {
    if (posted_) return false;
    posted_ = true;
    if (sent_) {
      transport.postSend({.peer = peer_,
                          .data = &entry_,
                          .bytes = sizeof entry_,
                          .number = *numbers_[0].send,
                          .confirm = true,
                          .call = call_,
                          .completion = &completion_});
    } else {
      RecvRequest request;
      request.peer = peer_;
      request.data = &entry_;
      request.bytes = sizeof entry_;
      request.number = *numbers_[0].recv;
      request.call = call_;
      request.completion = &completion_;
      transport.postRecv(request);
    }
    return true;
  }
  bool allPosted() const override { return posted_; }
  bool willNeed(int) const override { return !posted_; }

 private:
  CallEntry& entry_;
  int peer_;
  bool sent_;
  bool posted_ = false;
};

}  // namespace

HostBoard::HostBoard(World& world) : world_(world), peers_(static_cast<size_t>(world.size())) {
  std::vector<int> all(peers_.size());
  std::iota(all.begin(), all.end(), 0);
  ranks_ = std::make_shared<const std::vector<int>>(std::move(all));
}

std::unique_ptr<HostBoard::PendingEntry> HostBoard::submit(const CallEntry& entry, int peer,
                                                           bool sent) {
  auto made = std::make_unique<PendingEntry>(PendingEntry{entry, nullptr});
  made->work = std::make_shared<EntryWork>(ranks_, made->entry, peer, sent);
  world_.submit(made->work);
  return made;
}

// Whether the entry has arrived, or was taken; if it failed, the peer keeps the failure. The
// entries that a peer sent before it left still end well.
bool HostBoard::ended(Peer& peer, const PendingEntry& pending) {
  if (left_ || !world_.test(*pending.work)) return false;
  try {
    world_.wait(*pending.work, 0, {});
    return true;
  } catch (const Error& error) {
    if (!peer.failure || error.kind() == ErrorKind::kMismatch) peer.failure = error;
    return false;
  }
}

// Counts the entries up to the first that has not come; all ones if all expected ones have, since
// the peer may have sent more.
uint64_t HostBoard::validPosts(int src, int /*own*/) {
  Peer& peer = peers_[static_cast<size_t>(src)];
  uint64_t come = peer.taken;
  for (const auto& pending : peer.receives) {
    if (!ended(peer, *pending)) return come;
    ++come;
  }
  return ~0ULL;
}

bool HostBoard::post(int /*own*/, int dst, const CallEntry& entry) {
  peers_[static_cast<size_t>(dst)].sends.push_back(submit(entry, dst, true));
  return true;
}

void HostBoard::expect(int src, int /*own*/, const CallEntry& entry) {
  peers_[static_cast<size_t>(src)].receives.push_back(submit(entry, src, false));
}

std::optional<CallEntry> HostBoard::take(int src, int /*own*/) {
  Peer& peer = peers_[static_cast<size_t>(src)];
  if (peer.receives.empty()) return std::nullopt;
  if (!ended(peer, *peer.receives.front())) {
    if (peer.failure && peer.failure->kind() == ErrorKind::kMismatch) throw Error(*peer.failure);
    return std::nullopt;
  }
  const CallEntry entry = peer.receives.front()->entry;
  peer.receives.pop_front();
  ++peer.taken;
  return entry;
}

uint64_t HostBoard::accepted(int /*own*/, int dst) {
  Peer& peer = peers_[static_cast<size_t>(dst)];
  while (!peer.sends.empty() && ended(peer, *peer.sends.front())) {
    peer.sends.pop_front();
    ++peer.accepted;
  }
  return peer.accepted;
}

BoardState HostBoard::state(int rank) {
  if (left_) return BoardState::kReady;
  Peer& peer = peers_[static_cast<size_t>(rank)];
  const auto now = Clock::now();
  if (!peer.failure && now - peer.state_checked >= kStateInterval) {
    peer.state_checked = now;
    peer.failure = world_.departure(rank);
  }
  if (!peer.failure) return BoardState::kReady;
  return peer.failure->kind() == ErrorKind::kPeerLost ? BoardState::kClosed : BoardState::kFailed;
}

Error HostBoard::lastError(int rank) { return *peers_[static_cast<size_t>(rank)].failure; }

void HostBoard::fail(int /*own*/, const Error& error,
                     const std::vector<uint64_t>& /*valid_posts*/) {
  world_.abortTransport(error.what());
}

void HostBoard::leave(int own, const std::string& /*reason*/,
                      const std::vector<uint64_t>& /*valid_posts*/) {
  const auto limit = Clock::now() + kLeaveTimeout;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    const int rank = static_cast<int>(peer);
    while (accepted(own, rank), !peers_[peer].sends.empty()) {
      if (state(rank) != BoardState::kReady || Clock::now() >= limit) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  left_ = true;
}

}  // namespace hdpcomm
