// Messages over links: pairs of ranks of one host whose arenas are mapped (arena.hpp).
#pragma once

#include <memory>
#include <vector>

#include "collective/peer_reads.hpp"
#include "transport/stream/call_board.hpp"
#include "transport/stream/links/link.hpp"
#include "transport/stream/links/peer_reads.hpp"
#include "transport/stream/links/rounds.hpp"
#include "transport/stream/links/small_messages.hpp"
#include "transport/stream/runner.hpp"
#include "transport/stream/scratch.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

class LinkMover final : public StreamMover {
 public:
  // `places`: by rank of the world, its place in the arenas; -1: there is no link to it.
  LinkMover(DevicePtr device, std::unique_ptr<device::Arena> arena,
            std::shared_ptr<device::SharedBoard> board, const DeviceTransportCosts& costs,
            std::vector<int> places, int rank);
  // The engine of this mover may never have started, while engines of peers did, which write into
  // its arena.
  ~LinkMover() override;

  const char* name() const override { return device_->isSim() ? "sim" : "cuda"; }
  Zone zone() const override {
    return {arena_ != nullptr ? arena_->landing(place_) : nullptr, landing_bytes_};
  }
  size_t scratchBytes() const override { return scratch_.bytes(); }
  size_t arenaBytes() const override { return arena_ != nullptr ? arena_->bytes() : 0; }
  bool lands(int peer) const override { return placeOf(peer) >= 0; }
  PlanningRules planning(const std::vector<int>& ranks) const override;
  Traffic trafficOf(const Collective& operation) const override;
  std::unique_ptr<PreparedExchange> prepare(const Exchange& operation) override;
  std::unique_ptr<PreparedCollective> prepare(const Collective& operation) override;
  // Carries the transfers of a run with the ranks that this one has links to.
  std::unique_ptr<StepTransfers> transfersOf(const ScheduleRun& run);
  std::vector<Stream> streams() const override;
  void release(Stream control) override;
  void retire() override;
  Stats stats() const override { return counts_.named(num_used_); }

 private:
  class LinkExchange;
  class PeerReadCollective;
  class Transfers;
  struct Peer {
    std::unique_ptr<device::Link> link;  // made on first use
    bool used = false;
  };

  int placeOf(int rank) const { return places_[static_cast<size_t>(rank)]; }
  std::vector<int> placesOf(const std::vector<int>& ranks) const;
  void use(int peer);
  device::Link& link(int peer);
  // Whether a message over a link is a small one: the same on both sides.
  bool isSmall(const Message& message) const {
    return message.landing == kNoLanding && small_.fits(message.bytes());
  }
  void send(const Message& message, device::Fork& fork, device::Rounds& rounds);
  void receive(const Message& message, device::Fork& fork, device::Rounds& rounds);

  const DevicePtr device_;
  const std::vector<int> places_;
  const int rank_;
  const int place_;
  const size_t landing_bytes_;
  std::unique_ptr<device::Arena> arena_;
  const std::shared_ptr<device::SharedBoard> board_;
  ScratchPool scratch_;
  const std::shared_ptr<EventPool> events_;
  OwnedEvent fork_event_;  // recorded anew at each fork
  const DeviceTransportCosts costs_;
  device::PeerReads reads_;
  device::SmallMessages small_;
  std::vector<Peer> peers_;
  size_t num_used_ = 0;  // peers with which there were messages
  MessageCounts counts_;
};

}  // namespace hdpcomm
