// The call board of ranks on several hosts: its entries are messages of the host world, one a call,
// and the world compares the calls as it does those of its own messages.
//
// They take their places among the world's other messages, so what the ranks' programs do with host
// tensors and with device tensors is held to one order. A rank that fails aborts its end of the
// host world: that is how the others hear of it.
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
  void fail(int own, const Error& error, const std::vector<uint64_t>& sound) override;
  // Waits a moment for the peers to take what they were told.
  void leave(int own, const std::string& reason, const std::vector<uint64_t>& sound) override;
  // Who has called an operation takes part in it to its end, or says that it failed.
  uint64_t sound(int src, int own) override;
  device::BoardState state(int rank) override;
  Error lastWords(int rank) override;
  bool processAlive(int /*rank*/) override { return true; }  // state() knows of the dead
  bool post(int own, int dst, const device::CallEntry& entry) override;
  void expect(int src, int own, const device::CallEntry& entry) override;
  // Throws Mismatch where the peer called something else.
  std::optional<device::CallEntry> take(int src, int own) override;
  void accept(int /*src*/, int /*own*/) override {}  // the message's end says it
  uint64_t accepted(int own, int dst) override;

 private:
  struct Parcel {
    device::CallEntry entry;
    std::shared_ptr<Work> work;
  };
  struct Peer {
    std::deque<std::unique_ptr<Parcel>> sends;
    std::deque<std::unique_ptr<Parcel>> receives;
    uint64_t taken = 0;
    uint64_t accepted = 0;
    std::optional<Error> words;  // it has failed or left
    Clock::time_point asked;     // when it was last asked whether it lives
  };
  std::unique_ptr<Parcel> parcel(const device::CallEntry& entry, int peer, bool sent);
  bool ended(Peer& peer, const Parcel& parcel);

  World& world_;
  Ranks ranks_;
  std::vector<Peer> peers_;
  bool left_ = false;
};

}  // namespace hdpcomm
