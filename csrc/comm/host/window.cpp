#include "comm/host/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>

#include "base/futex.hpp"
#include "transport/host/shm/shared_file.hpp"

namespace hdpcomm {
namespace {

constexpr size_t kPage = 4096;
constexpr std::chrono::milliseconds kSleep(20);   // at most, so that stop() is seen
constexpr std::chrono::milliseconds kCheck(100);  // between two looks whether all ranks live
constexpr int kPolls = 200;

std::shared_ptr<Mapping> map(int fd, size_t bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throwSystemError("mmap of a window", __FILE__, __LINE__, errno);
  return std::make_shared<Mapping>(address, bytes);
}

}  // namespace

Window::Window(const Communicator& comm, size_t words, size_t bytes)
    : world_(comm.sharedWorld()),
      ranks_(comm.sharedRanks()),
      words_(words),
      begin_((words * sizeof(uint32_t) + kPage - 1) / kPage * kPage),
      bytes_(bytes),
      fd_(shm::createSharedFile("hdpcomm-window", std::max(begin_ + bytes, kPage))),
      memories_(ranks_->size()) {
  memories_.at(static_cast<size_t>(comm.rank())) = map(fd_.get(), std::max(begin_ + bytes, kPage));
}

Window::~Window() { stop(); }

void Window::open(int position, int pid, int descriptor) {
  std::shared_ptr<Mapping>& memory = memories_.at(static_cast<size_t>(position));
  if (memory != nullptr) return;
  size_t bytes = 0;
  const Fd fd = shm::openSharedFile(pid, descriptor, O_RDWR, &bytes);
  if (bytes != std::max(begin_ + bytes_, kPage)) {
    throwInvalidUsage(
        "the window of rank " + std::to_string((*ranks_)[static_cast<size_t>(position)]) + " has " +
        std::to_string(bytes) + " bytes and that of rank " + std::to_string(world_->rank()) + " " +
        std::to_string(begin_ + bytes_) + "; all ranks must give the same sizes");
  }
  memory = map(fd.get(), bytes);
}

std::shared_ptr<std::byte> Window::data(int position) const {
  const std::shared_ptr<Mapping>& memory = memories_.at(static_cast<size_t>(position));
  if (memory == nullptr) throwInvalidUsage("the window of this rank is not mapped yet");
  return {memory, memory->data() + begin_};
}

std::atomic<uint32_t>& Window::word(int position, size_t word) const {
  const std::shared_ptr<Mapping>& memory = memories_.at(static_cast<size_t>(position));
  if (memory == nullptr || word >= words_) {
    throwInvalidUsage("word " + std::to_string(word) + " of a window of " + std::to_string(words_) +
                      " words was asked for");
  }
  return reinterpret_cast<std::atomic<uint32_t>*>(memory->data())[word];
}

void Window::set(int position, size_t index, uint32_t value) {
  std::atomic<uint32_t>& place = word(position, index);
  place.store(value, std::memory_order_release);
  futexWakeAll(place);
}

uint32_t Window::get(int position, size_t index) const {
  return word(position, index).load(std::memory_order_acquire);
}

void Window::wait(int position, size_t index, uint32_t value, int awaited,
                  const World::InterruptCheck& check_interrupt) {
  std::atomic<uint32_t>& place = word(position, index);
  for (int poll = 0; poll < kPolls; ++poll) {
    if (place.load(std::memory_order_acquire) == value) return;
  }
  const auto start = Clock::now();
  auto deadline = start + durationOf(world_->timeout());
  auto next_check = start;
  const int rank = ranks_->at(static_cast<size_t>(awaited));
  world_->reportPartMoves(
      {{rank}, "waits for its turn after rank " + std::to_string(rank), waits_});
  world_->beginWait();
  try {
    for (;;) {
      const uint32_t found = place.load(std::memory_order_acquire);
      if (found == value) break;
      const auto now = Clock::now();
      if (now >= next_check || stopped_.load(std::memory_order_acquire)) {
        checkWait(position, index, awaited, start, &deadline);
        next_check = now + kCheck;
      }
      futexWait(place, found, kSleep);
      if (check_interrupt) check_interrupt();
    }
  } catch (...) {
    world_->endWait();
    world_->reportPartMoves({{}, "waited for its turn", waits_.fetch_add(1) + 1});
    throw;
  }
  world_->endWait();
  world_->reportPartMoves({{}, "had its turn", waits_.fetch_add(1) + 1});
}

void Window::checkWait(int position, size_t index, int awaited, Clock::time_point start,
                       Clock::time_point* deadline) {
  if (stopped_.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kAborted, "what this rank waited for was given up", context(-1));
  }
  world_->checkUsable();
  for (const int rank : *ranks_) {
    if (rank == world_->rank()) continue;
    if (const auto gone = world_->departure(rank)) {
      throw Error(gone->kind(), gone->what(), context(rank));
    }
  }
  const auto now = Clock::now();
  if (now < *deadline) return;
  const int rank = ranks_->at(static_cast<size_t>(awaited));
  std::optional<Deadlines::Stuck> stuck;
  if (world_->goesByLiveness()) {
    const Deadlines::Allowed allowed = world_->allowed({rank}, start);
    *deadline = std::max(*deadline, allowed.until);
    stuck = allowed.stuck;
  }
  if (now < *deadline) return;
  const double waited_s = std::chrono::duration<double>(now - start).count();
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(world_->rank()) + " waited " + std::to_string(waited_s) +
                  " s for rank " + std::to_string(rank) + " to use a window of rank " +
                  std::to_string((*ranks_)[static_cast<size_t>(position)]) + " (word " +
                  std::to_string(index) +
                  "): " + (stuck ? stuck->text : "look at what it does, or raise timeout="),
              context(stuck ? stuck->rank : rank));
}

ErrorContext Window::context(int peer) const {
  return {.rank = world_->rank(), .peer = peer, .op = "window", .ranks = *ranks_, .seq = -1};
}

}  // namespace hdpcomm
