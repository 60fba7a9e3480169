#include "hdpcomm/comm/host_board.hpp"

#include <chrono>
#include <numeric>
#include <thread>

namespace hdpcomm {
namespace {

using device::BoardState;
using device::CallEntry;
using std::chrono::milliseconds;

constexpr auto kAskAgain = milliseconds(50);
constexpr auto kGoodbye = std::chrono::seconds(2);
// "board": not the hash of any ranks in practice, so that a message of the program never passes for
// an entry.
constexpr uint64_t kBoardHash = 0x626f617264ULL;

}  // namespace

HostBoard::HostBoard(World& world) : world_(world), peers_(static_cast<size_t>(world.size())) {
  std::vector<int> all(peers_.size());
  std::iota(all.begin(), all.end(), 0);
  ranks_ = std::make_shared<const std::vector<int>>(std::move(all));
}

std::unique_ptr<HostBoard::Parcel> HostBoard::parcel(const CallEntry& entry, int peer, bool sent) {
  auto made = std::make_unique<Parcel>(Parcel{entry, nullptr});
  Call call;
  call.subset_hash = kBoardHash;
  call.group_size = static_cast<uint16_t>(world_.size());
  const ExchangeWork::Message message{&made->entry, sizeof made->entry, DType::kUint8, peer};
  const std::span<const ExchangeWork::Message> one(&message, 1);
  const std::span<const ExchangeWork::Message> none;
  made->work = std::make_shared<ExchangeWork>(call, ranks_, sent ? one : none, sent ? none : one);
  world_.submit(made->work);
  return made;
}

// What became of it goes to the peer's last words if it failed.
bool HostBoard::ended(Peer& peer, const Parcel& parcel) {
  if (left_ || peer.words || !world_.test(*parcel.work)) return false;
  try {
    world_.wait(*parcel.work, 0, {});
    return true;
  } catch (const Error& error) {
    peer.words = error;
    return false;
  }
}

bool HostBoard::post(int /*own*/, int dst, const CallEntry& entry) {
  peers_[static_cast<size_t>(dst)].sends.push_back(parcel(entry, dst, true));
  return true;
}

void HostBoard::expect(int src, int /*own*/) {
  peers_[static_cast<size_t>(src)].receives.push_back(parcel({}, src, false));
}

std::optional<CallEntry> HostBoard::take(int src, int /*own*/) {
  Peer& peer = peers_[static_cast<size_t>(src)];
  if (peer.receives.empty() || !ended(peer, *peer.receives.front())) return std::nullopt;
  const CallEntry entry = peer.receives.front()->entry;
  peer.receives.pop_front();
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
  if (!peer.words && now - peer.asked >= kAskAgain) {
    peer.asked = now;
    peer.words = world_.departure(rank);
  }
  if (!peer.words) return BoardState::kReady;
  return peer.words->kind() == ErrorKind::kPeerLost ? BoardState::kClosed : BoardState::kFailed;
}

Error HostBoard::lastWords(int rank) { return *peers_[static_cast<size_t>(rank)].words; }

void HostBoard::fail(int /*own*/, const Error& error, const std::vector<uint64_t>& /*sound*/) {
  world_.abortTransport(error.what());
}

void HostBoard::leave(int own, const std::string& /*reason*/,
                      const std::vector<uint64_t>& /*sound*/) {
  const auto limit = Clock::now() + kGoodbye;
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
