// The call board of ranks on several hosts: its entries are messages of the host world, one a call,
// and the world compares the calls as it does those of its own messages.
//
// The entries are in order with the world's other messages, so a program must submit operations on
// host tensors and on device tensors in one order on all ranks. A rank that fails aborts its end of
// the host world, which tells the others.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/host/world.hpp"
#include "transport/stream/call_board.hpp"

namespace hdpcomm {

class HostBoard final : public device::CallBoard {
 public:
  // `world` must live until leave().
  explicit HostBoard(World& world);

  uint64_t key() const override { return 0; }
  void enter(int /*own*/) override {}
  void fail(int own, const Error& error, const std::vector<uint64_t>& valid_posts) override;
  // Waits a moment for the peers to take the entries that were sent to them.
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& valid_posts) override;
  // A rank that has posted its entry takes part in the operation to its end, or says that it
  // failed: all posts that have come are valid.
  uint64_t validPosts(int src, int own) override;
  device::BoardState state(int rank) override;
  Error lastError(int rank) override;
  bool processAlive(int /*rank*/) override { return true; }  // state() knows of the dead
  bool post(int own, int dst, const device::CallEntry& entry) override;
  void expect(int src, int own, const device::CallEntry& entry) override;
  // Throws Mismatch where the peer called something else.
  std::optional<device::CallEntry> take(int src, int own) override;
  void accept(int /*src*/, int /*own*/) override {}  // the message's end says it
  uint64_t accepted(int own, int dst) override;

 private:
  struct PendingEntry {
    device::CallEntry entry;
    std::shared_ptr<Work> work;
  };
  struct Peer {
    std::deque<std::unique_ptr<PendingEntry>> sends;
    std::deque<std::unique_ptr<PendingEntry>> receives;
    uint64_t taken = 0;
    uint64_t accepted = 0;
    std::optional<Error> failure;     // it has failed or left
    Clock::time_point state_checked;  // when the world was last asked for its failure
  };
  std::unique_ptr<PendingEntry> submit(const device::CallEntry& entry, int peer, bool sent);
  bool ended(Peer& peer, const PendingEntry& pending);

  World& world_;
  Ranks ranks_;
  std::vector<Peer> peers_;
  bool left_ = false;
};

}  // namespace hdpcomm
