#include "transport/stream/call_board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>

#include "base/process.hpp"

namespace hdpcomm::device {
namespace {

constexpr size_t kEntries = 64;  // of a pair of ranks; what exceeds them waits in the poster
constexpr size_t kText = 1024;

}  // namespace

struct alignas(64) SharedBoard::Header {
  uint64_t key;  // written before any other rank gets the address
};

struct alignas(64) SharedBoard::Control {
  // Release by the rank after the fields below that belong to the state; the others' acquire load
  // that sees the state sees them.
  std::atomic<BoardState> state;
  std::atomic<uint32_t> departed;  // release: the rank's streams are done before
  int32_t pid;
  uint64_t start_time;
  uint32_t error_kind;
  int32_t peer;
  char text[kText];
};

struct alignas(64) SharedBoard::Ring {
  // Release by the sender after the entry; by the receiver after it has copied the entry. Neither
  // count ever wraps.
  std::atomic<uint64_t> written;
  uint64_t valid_posts;  // published by the sender's state
  alignas(64) std::atomic<uint64_t> taken;
  std::atomic<uint64_t> accepted;  // release by the receiver, which has not failed then
  alignas(64) CallEntry entries[kEntries];
};

size_t SharedBoard::bytes(int num_ranks) {
  const auto n = static_cast<size_t>(num_ranks);
  return sizeof(Header) + n * sizeof(Control) + n * n * sizeof(Ring);
}

SharedBoard::SharedBoard(Fd fd, int num_ranks) : fd_(std::move(fd)), num_ranks_(num_ranks) {
  void* address = ::mmap(nullptr, bytes(num_ranks), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (address == MAP_FAILED) throwSystemError("mmap of the call board", __FILE__, __LINE__, errno);
  mapping_ = Mapping(address, bytes(num_ranks));
}

std::shared_ptr<SharedBoard> SharedBoard::create(int num_ranks) {
  Fd fd(HDP_SYS(::memfd_create("hdpcomm-calls", MFD_CLOEXEC)));
  HDP_SYS(::ftruncate(fd.get(), static_cast<off_t>(bytes(num_ranks))));
  std::shared_ptr<SharedBoard> board(new SharedBoard(std::move(fd), num_ranks));
  std::random_device random;
  reinterpret_cast<Header*>(board->mapping_.data())->key = (uint64_t{random()} << 32) | random();
  return board;
}

uint64_t SharedBoard::key() const { return reinterpret_cast<const Header*>(mapping_.data())->key; }

std::shared_ptr<SharedBoard> SharedBoard::open(const std::string& address, int num_ranks) {
  int pid = 0;
  int remote_fd = 0;
  if (std::sscanf(address.c_str(), "%d:%d", &pid, &remote_fd) != 2) {
    throwInvalidUsage("'" + address + "' is not the address of a call board (pid:descriptor)");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(remote_fd);
  Fd fd(HDP_SYS(::open(path.c_str(), O_RDWR | O_CLOEXEC)));
  struct stat info{};
  HDP_SYS(::fstat(fd.get(), &info));
  if (static_cast<size_t>(info.st_size) != bytes(num_ranks)) {
    throwInvalidUsage(path + " is not the call board of " + std::to_string(num_ranks) +
                      " ranks: start all ranks with the same world size and version");
  }
  return std::shared_ptr<SharedBoard>(new SharedBoard(std::move(fd), num_ranks));
}

std::string SharedBoard::address() const {
  return std::to_string(::getpid()) + ":" + std::to_string(fd_.get());
}

SharedBoard::Control& SharedBoard::control(int rank) const {
  return reinterpret_cast<Control*>(mapping_.data() + sizeof(Header))[rank];
}

SharedBoard::Ring& SharedBoard::ring(int src, int dst) const {
  auto* rings = reinterpret_cast<Ring*>(mapping_.data() + sizeof(Header) +
                                        static_cast<size_t>(num_ranks_) * sizeof(Control));
  return rings[static_cast<size_t>(src) * static_cast<size_t>(num_ranks_) +
               static_cast<size_t>(dst)];
}

void SharedBoard::enter(int rank) {
  Control& own = control(rank);
  own.pid = ::getpid();
  own.start_time = ownStartTime();
  own.state.store(BoardState::kReady, std::memory_order_release);
}

void SharedBoard::fail(int rank, const Error& error, const std::vector<uint64_t>& valid_posts) {
  Control& own = control(rank);
  if (own.state.load(std::memory_order_relaxed) != BoardState::kReady) return;
  own.error_kind = static_cast<uint32_t>(error.kind());
  own.peer = error.context().peer;
  writeText(own.text, kText, error.what());
  end(rank, BoardState::kFailed, valid_posts);
}

void SharedBoard::leave(int rank, const std::string& reason,
                        const std::vector<uint64_t>& valid_posts) {
  Control& own = control(rank);
  // A failure stays readable: the others must get it.
  if (own.state.load(std::memory_order_relaxed) != BoardState::kReady) return;
  own.error_kind = static_cast<uint32_t>(ErrorKind::kPeerLost);
  own.peer = rank;
  writeText(own.text, kText,
            "rank " + std::to_string(rank) + " closed its communicator" +
                (reason.empty() ? "" : "; its last words: " + reason));
  end(rank, BoardState::kClosed, valid_posts);
}

void SharedBoard::end(int rank, BoardState state, const std::vector<uint64_t>& valid_posts) {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    ring(rank, peer).valid_posts = valid_posts[static_cast<size_t>(peer)];
  }
  control(rank).state.store(state, std::memory_order_release);
}

uint64_t SharedBoard::validPosts(int src, int dst) { return ring(src, dst).valid_posts; }

void SharedBoard::depart(int rank) { control(rank).departed.store(1, std::memory_order_release); }

bool SharedBoard::allDeparted() const {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (control(rank).departed.load(std::memory_order_acquire) == 0 && alive(rank)) {
      return false;
    }
  }
  return true;
}

BoardState SharedBoard::state(int rank) {
  return control(rank).state.load(std::memory_order_acquire);
}

Error SharedBoard::lastError(int rank) {
  const Control& other = control(rank);
  const std::string text = readText(other.text, kText);
  return Error(static_cast<ErrorKind>(other.error_kind), text,
               {.rank = -1, .peer = rank, .op = {}, .ranks = {}, .seq = -1});
}

bool SharedBoard::processAlive(int rank) { return alive(rank); }

bool SharedBoard::alive(int rank) const {
  const Control& other = control(rank);
  return other.pid == ::getpid() || hdpcomm::processAlive(other.pid, other.start_time);
}

bool SharedBoard::post(int src, int dst, const CallEntry& entry) {
  Ring& pair = ring(src, dst);
  const uint64_t index = pair.written.load(std::memory_order_relaxed);
  if (index - pair.taken.load(std::memory_order_acquire) >= kEntries) return false;
  pair.entries[index % kEntries] = entry;
  pair.written.store(index + 1, std::memory_order_release);
  return true;
}

std::optional<CallEntry> SharedBoard::take(int src, int dst) {
  Ring& pair = ring(src, dst);
  const uint64_t index = pair.taken.load(std::memory_order_relaxed);
  if (pair.written.load(std::memory_order_acquire) == index) return std::nullopt;
  const CallEntry entry = pair.entries[index % kEntries];
  pair.taken.store(index + 1, std::memory_order_release);
  return entry;
}

void SharedBoard::accept(int src, int dst) {
  ring(src, dst).accepted.fetch_add(1, std::memory_order_release);
}

uint64_t SharedBoard::accepted(int src, int dst) {
  return ring(src, dst).accepted.load(std::memory_order_acquire);
}

}  // namespace hdpcomm::device
