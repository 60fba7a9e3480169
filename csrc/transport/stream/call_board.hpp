// What the ranks of a device world tell each other beside their streams: every operation's call, so
// that a mismatch is found without a host ever waiting for the other, and who has failed or left.
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
  // From the poster to the reader, in all messages of the operation.
  uint64_t bytes = 0;
  // Into a graph, by a mover that wants it alike on both sides (StreamMover::capturesAlike).
  uint64_t captured = 0;
  // Messages with landing places of the exchange, to the reader (high half) and from it, where the
  // mover wants them together (StreamMover::landsTogether).
  uint64_t together = 0;

  bool operator==(const CallEntry&) const = default;
};

enum class BoardState : uint32_t { kAbsent, kReady, kFailed, kClosed };

// One rank's view of the board. `own` is that rank.
class CallBoard {
 public:
  virtual ~CallBoard() = default;

  // Different for all boards, equal on all ranks of one.
  virtual uint64_t key() const = 0;
  virtual void enter(int own) = 0;
  // Every rank has the board now.
  virtual void opened() {}
  // The rank takes part in nothing more: what the others raise when they need it. Of its posts to
  // each rank, the first `sound[rank]` belong to operations that it had ended well. The first call
  // counts.
  virtual void fail(int own, const Error& error, const std::vector<uint64_t>& sound) = 0;
  virtual void leave(int own, const std::string& reason, const std::vector<uint64_t>& sound) = 0;
  virtual uint64_t sound(int src, int own) = 0;
  virtual BoardState state(int rank) = 0;
  // Of a rank that has failed or left: what it said.
  virtual Error lastWords(int rank) = 0;
  virtual bool processAlive(int rank) = 0;

  // Of the pair src -> dst, in order; one thread on each side at a time. post() returns false when
  // there is no room.
  virtual bool post(int own, int dst, const CallEntry& entry) = 0;
  // One more entry will be taken; this one, if both sides agree.
  virtual void expect(int /*src*/, int /*own*/, const CallEntry& /*entry*/) {}
  // May throw what the board has found out itself.
  virtual std::optional<CallEntry> take(int src, int own) = 0;
  // The receiver has compared what it took last and agrees; how many entries it has agreed to.
  virtual void accept(int src, int own) = 0;
  virtual uint64_t accepted(int own, int dst) = 0;
};

// Of ranks that share a host: an anonymous shared file, as the shm transport's segment; nothing is
// left behind.
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
  void fail(int own, const Error& error, const std::vector<uint64_t>& sound) override;
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& sound) override;
  uint64_t sound(int src, int own) override;
  // The rank touches nobody's memory any more.
  void depart(int rank);
  bool allDeparted() const;  // or dead
  BoardState state(int rank) override;
  Error lastWords(int rank) override;
  bool processAlive(int rank) override;
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
  void end(int rank, BoardState state, const std::vector<uint64_t>& sound);
  Control& control(int rank) const;
  Ring& ring(int src, int dst) const;

  Fd fd_;
  int num_ranks_;
  Mapping mapping_;
};

}  // namespace hdpcomm::device
