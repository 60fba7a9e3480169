// Board on which the hosts of a device world post what streams cannot carry: every operation's
// call, so that a mismatch is found without one host waiting for another, and who has failed or
// left.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/call.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"

namespace hdpcomm::device {

// One operation (a collective) or one message (point to point) of a pair of ranks.
struct CallEntry {
  Call call;
  // Offset of a message's place in the receiver's landing zone; all ones: it goes through slots.
  uint64_t landing = ~0ULL;
  // Bytes from the poster to the reader, summed over the operation's messages.
  uint64_t bytes = 0;
  // 1: captured into a graph, and the mover wants that alike on both sides
  // (StreamMover::capturesAlike).
  uint64_t captured = 0;

  bool operator==(const CallEntry&) const = default;
};

enum class BoardState : uint32_t { kAbsent, kReady, kFailed, kClosed };

// One rank's view of the board. `own` is that rank.
class CallBoard {
 public:
  virtual ~CallBoard() = default;

  // Unique to the board, equal on all of its ranks.
  virtual uint64_t key() const = 0;
  virtual void enter(int own) = 0;
  // Every rank has the board now.
  virtual void opened() {}
  // The rank ends, with an error or without; peers that still need it raise what it says here. The
  // first `valid_posts[rank]` of its posts to each rank belong to operations that it had ended
  // well. Only the first call counts.
  virtual void fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) = 0;
  virtual void leave(int own, const std::string& reason,
                     const std::vector<uint64_t>& valid_posts) = 0;
  virtual uint64_t validPosts(int src, int own) = 0;
  virtual BoardState state(int rank) = 0;
  // The error, or the reason for leaving, of a rank that has failed or left.
  virtual Error lastError(int rank) = 0;
  virtual bool processAlive(int rank) = 0;
  // Whether it is known to have failed, or to have died before it left. Any thread may ask, and no
  // lock is taken.
  virtual bool lost(int /*rank*/) { return false; }

  // Entries of the pair src -> dst, in order; one thread on each side at a time. post() returns
  // false when there is no room.
  virtual bool post(int own, int dst, const CallEntry& entry) = 0;
  // One more entry will be taken; it equals this one, if both sides called the same.
  virtual void expect(int /*src*/, int /*own*/, const CallEntry& /*entry*/) {}
  // The next entry, if it has come. May throw a failure that the board has found by itself.
  virtual std::optional<CallEntry> take(int src, int own) = 0;
  // The receiver has compared the entry that it took last, and both sides called the same.
  virtual void accept(int src, int own) = 0;
  // The number of entries that the receiver has accepted.
  virtual uint64_t accepted(int own, int dst) = 0;
};

// Board of ranks that share a host: an anonymous shared file, as the shm transport's segment;
// nothing is left behind.
class SharedBoard final : public CallBoard {
 public:
  static std::shared_ptr<SharedBoard> create(int num_ranks);
  // `address` is what address() gave on the creating rank, which must still hold the descriptor.
  static std::shared_ptr<SharedBoard> open(const std::string& address, int num_ranks);

  std::string address() const;
  uint64_t key() const override;
  void enter(int own) override;
  // Closes the descriptor; the mapping stays.
  void opened() override { fd_ = Fd(); }
  void fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) override;
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& valid_posts) override;
  uint64_t validPosts(int src, int own) override;
  // The rank no longer touches the memory of any rank.
  void depart(int rank);
  bool allDeparted() const;  // dead ranks count as departed
  BoardState state(int rank) override;
  Error lastError(int rank) override;
  bool processAlive(int rank) override;
  bool lost(int rank) override {
    const BoardState now = state(rank);
    return now == BoardState::kFailed || (now != BoardState::kClosed && !processAlive(rank));
  }
  bool post(int own, int dst, const CallEntry& entry) override;
  std::optional<CallEntry> take(int src, int own) override;
  void accept(int src, int own) override;
  uint64_t accepted(int own, int dst) override;

 private:
  struct Header;
  struct Control;
  struct Ring;

  SharedBoard(Fd fd, int num_ranks);
  static size_t bytes(int num_ranks);
  bool alive(int rank) const;
  void end(int rank, BoardState state, const std::vector<uint64_t>& valid_posts);
  Control& control(int rank) const;
  Ring& ring(int src, int dst) const;

  Fd fd_;
  int num_ranks_;
  Mapping mapping_;
};

}  // namespace hdpcomm::device
