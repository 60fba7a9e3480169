#include "comm/host/counter.hpp"

#include <chrono>
#include <thread>

namespace hdpcomm {
namespace {

constexpr std::chrono::seconds kLastWords(1);  // that an owner's last words may take to come

}  // namespace

SharedCounter::SharedCounter(const Communicator& comm)
    : world_(comm.sharedWorld()),
      ranks_(comm.sharedRanks()),
      owner_(comm.globalRank(0, "counter")),
      place_(world_->openCounter()),
      words_(world_->counterWords(owner_)) {}

SharedCounter::SharedCounter(const Communicator& comm, int64_t word, int64_t generation)
    : world_(comm.sharedWorld()),
      ranks_(comm.sharedRanks()),
      owner_(comm.globalRank(0, "counter")),
      words_(world_->counterWords(owner_)) {
  if (word < 0 || word >= kCounterWords || generation < 1 || generation > kMaxCount) {
    throwInvalidUsage("counter() was told of word " + std::to_string(word) + ", generation " +
                      std::to_string(generation) + " of rank " + std::to_string(owner_) +
                      ", which no rank of this version of hdpcomm tells");
  }
  place_ = {static_cast<uint32_t>(word), static_cast<uint32_t>(generation)};
}

SharedCounter::~SharedCounter() { close(); }

std::optional<uint32_t> SharedCounter::fetchAddHere(int64_t amount) {
  if (words_ == nullptr || closed_.load(std::memory_order_relaxed) || !world_->usable()) {
    return std::nullopt;
  }
  const FetchResult result = hdpcomm::fetchAdd(
      words_->at[place_.word], {place_.word, place_.generation, checkedAmount(amount)});
  if (result.end != FetchEnd::kAdded) return std::nullopt;
  world_->noteFetch();
  return result.before;
}

uint32_t SharedCounter::fetchAdd(int64_t amount, const World::InterruptCheck& check_interrupt) {
  const FetchRequest request{place_.word, place_.generation, checkedAmount(amount)};
  world_->checkUsable();
  if (closed_.load(std::memory_order_relaxed)) throwClosed();
  const FetchResult result = words_ != nullptr
                                 ? hdpcomm::fetchAdd(words_->at[place_.word], request)
                                 : world_->fetchFrom(owner_, request, ranks_, check_interrupt);
  switch (result.end) {
    case FetchEnd::kAdded:
      world_->noteFetch();
      return result.before;
    case FetchEnd::kOverflow:
      throwInvalidUsage("fetch_add(" + std::to_string(amount) + ") was called at " +
                        std::to_string(result.before) + "; a counter goes to " +
                        std::to_string(kMaxCount) + ", and nothing was added: make a new one");
    case FetchEnd::kOwnerLeft:
      throwOwnerLeft();
    case FetchEnd::kClosed:
      break;
  }
  throwClosed();
}

uint32_t SharedCounter::checkedAmount(int64_t amount) {
  if (amount >= 1 && amount <= kMaxCount) return static_cast<uint32_t>(amount);
  throwInvalidUsage("fetch_add() got " + std::to_string(amount) + "; give 1 to " +
                    std::to_string(kMaxCount));
}

void SharedCounter::throwClosed() const {
  const bool here = closed_.load(std::memory_order_relaxed);
  throw Error(ErrorKind::kInvalidUsage,
              "this counter was closed by " +
                  (here ? "this rank" : "rank " + std::to_string(owner_)) +
                  ": let all ranks end with it before its owner closes it, or make a new one",
              {.rank = world_->rank(),
               .peer = here ? -1 : owner_,
               .op = "fetch_add",
               .ranks = *ranks_,
               .seq = -1});
}

// From another host, the answer overtakes what the owner says when it leaves.
void SharedCounter::throwOwnerLeft() {
  const auto until = Clock::now() + kLastWords;
  auto gone = world_->departure(owner_);
  while (!gone && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    gone = world_->departure(owner_);
  }
  throw Error(
      ErrorKind::kPeerLost,
      (gone ? gone->what() : "rank " + std::to_string(owner_) + " closed its communicator") +
          std::string(": it owned the counter"),
      {.rank = world_->rank(), .peer = owner_, .op = "fetch_add", .ranks = *ranks_, .seq = -1});
}

void SharedCounter::close() noexcept {
  if (!closed_.exchange(true, std::memory_order_relaxed) && owned()) world_->closeCounter(place_);
}

}  // namespace hdpcomm
