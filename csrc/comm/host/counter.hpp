// A count that the ranks of a communicator share: a word of the memory of its first rank, the
// owner (transport/counters.hpp). Thread-safe.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "comm/host/communicator.hpp"

namespace hdpcomm {

class SharedCounter {
 public:
  // On the owner: opens a counter at 0. Throws InvalidUsage if this rank has too many.
  explicit SharedCounter(const Communicator& comm);
  // On the others: the one that the owner has told them of.
  SharedCounter(const Communicator& comm, int64_t word, int64_t generation);
  ~SharedCounter();
  SharedCounter(const SharedCounter&) = delete;
  SharedCounter& operator=(const SharedCounter&) = delete;

  int owner() const { return owner_; }  // global rank
  uint32_t word() const { return place_.word; }
  uint32_t generation() const { return place_.generation; }

  // The count before the amount was added, if the owner is of this host and all is well; else
  // nothing was added, and fetchAdd() tells why or asks the owner. Never blocks.
  std::optional<uint32_t> fetchAddHere(int64_t amount);
  // The same of any owner. Throws InvalidUsage for an amount that is not 1 to kMaxCount, a sum
  // above that, or a closed counter; PeerLost if the owner has left, or cannot be reached any more;
  // CommTimeout past the world's deadline.
  uint32_t fetchAdd(int64_t amount, const World::InterruptCheck& check_interrupt);

  // The owner ends the counter for all, other ranks for themselves. Idempotent, and never waits for
  // another rank.
  void close() noexcept;

 private:
  static uint32_t checkedAmount(int64_t amount);
  [[noreturn]] void throwClosed() const;
  [[noreturn]] void throwOwnerLeft();
  bool owned() const { return owner_ == world_->rank(); }

  std::shared_ptr<World> world_;
  Ranks ranks_;
  int owner_;  // global rank
  OwnCounters::Place place_;
  std::shared_ptr<CounterWords> words_;  // the owner's; null where it is of another host
  std::atomic<bool> closed_{false};      // relaxed: nothing follows from it
};

}  // namespace hdpcomm
