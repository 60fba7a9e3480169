// What the ranks of a device world tell each other through host memory: every operation's call, so
// that a mismatch is found without a host ever waiting for the other, and who has failed or left.
//
// An anonymous shared file, as the shm transport's segment: nothing is left behind.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hdpcomm/base/error.hpp"
#include "hdpcomm/base/fd.hpp"
#include "hdpcomm/transport/call.hpp"

namespace hdpcomm::device {

// One operation (a collective) or one message (point to point) of a pair of ranks.
struct CallEntry {
  Call call;
  // Offset of a message's place in the receiver's landing zone; all ones: it goes through slots.
  uint64_t landing = ~0ULL;
  // From the poster to the reader, in all messages of the operation.
  uint64_t bytes = 0;

  bool operator==(const CallEntry&) const = default;
};

enum class BoardState : uint32_t { kAbsent, kReady, kFailed, kClosed };

class CallBoard {
 public:
  static std::shared_ptr<CallBoard> create(int num_ranks);
  // `address` is what address() gave on the creating rank, which must still hold the descriptor.
  static std::shared_ptr<CallBoard> open(const std::string& address, int num_ranks);

  std::string address() const;
  // Closes the descriptor once every rank has mapped the board; the mapping stays.
  void release() { fd_ = Fd(); }
  // Different for all boards, equal on all ranks of one.
  uint64_t key() const;

  void enter(int rank);
  // The rank takes part in nothing more: what the others raise when they need it. Of its posts to
  // each rank, the first `sound[rank]` belong to operations that it had ended well. The first call
  // counts.
  void fail(int rank, const Error& error, const std::vector<uint64_t>& sound);
  void leave(int rank, const std::string& reason, const std::vector<uint64_t>& sound);
  uint64_t sound(int src, int dst) const;
  // The rank touches nobody's memory any more.
  void depart(int rank);
  bool allDeparted() const;  // or dead
  BoardState state(int rank) const;
  // Of a rank that has failed or left: what it said.
  Error lastWords(int rank) const;
  bool processAlive(int rank) const;

  // Of the pair src -> dst, in order. post() returns false when the ring is full. One thread on
  // each side at a time.
  bool post(int src, int dst, const CallEntry& entry);
  std::optional<CallEntry> take(int src, int dst);
  // The receiver has compared what it took last and agrees; how many entries it has agreed to.
  void accept(int src, int dst);
  uint64_t accepted(int src, int dst) const;

 private:
  struct Header;
  struct Control;
  struct Ring;

  CallBoard(Fd fd, int num_ranks);
  static size_t bytes(int num_ranks);
  void end(int rank, BoardState state, const std::vector<uint64_t>& sound);
  Control& control(int rank) const;
  Ring& ring(int src, int dst) const;

  Fd fd_;
  int num_ranks_;
  Mapping mapping_;
};

}  // namespace hdpcomm::device
