// Messages over links: pairs of ranks of one host whose arenas are mapped (transport/device).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "collective/peer_reads.hpp"
#include "transport/stream/call_board.hpp"
#include "transport/stream/links/link.hpp"
#include "transport/stream/links/peer_reads.hpp"
#include "transport/stream/scratch.hpp"
#include "transport/stream/stream_mover.hpp"

namespace hdpcomm {

class LinkMover final : public StreamMover {
 public:
  // `places`: by rank of the world, its place in the arenas; -1: there is no link to it.
  LinkMover(DevicePtr device, std::unique_ptr<device::Arena> arena,
            std::shared_ptr<device::SharedBoard> board, const DeviceCosts& costs,
            std::vector<int> places, int rank);

  // In, out and temporary memory of a schedule, by Buffer.
  using Buffers = std::array<std::byte*, 3>;

  // The transfers of a schedule between this rank and those that it has links to, step by step.
  class Pass {
   public:
    Pass(LinkMover& mover, const Collective& operation) : mover_(mover), operation_(operation) {}
    // Starts those of a step, beside the operation's stream.
    void begin(const Step& step, const Buffers& buffers);
    // The stream goes on after them, but for deferred sends; and after these, too.
    void end();
    void finish();

   private:
    LinkMover& mover_;
    const Collective& operation_;
    std::optional<device::Fork> fork_;
    std::vector<device::Fork> deferred_;
  };

  const char* name() const override { return device_->isSim() ? "sim" : "cuda"; }
  Zone zoneFor(int /*source*/) const override {
    return {arena_ != nullptr ? arena_->landing(place_) : nullptr, landing_bytes_};
  }
  size_t scratchBytes() const override { return scratch_.bytes(); }
  size_t arenaBytes() const override { return arena_ != nullptr ? arena_->bytes() : 0; }
  bool lands(int peer) const override { return placeOf(peer) >= 0; }
  PlanningRules planning(const std::vector<int>& ranks) const override;
  Traffic trafficOf(const Collective& operation) const override;
  void prepare(const Messages& sends, const Messages& recvs, bool captured) override;
  void prepare(const Collective& operation) override;
  std::vector<Stream> exchange(const Exchange& operation, const Look& look) override;
  void collective(const Collective& operation, const Look& look) override;
  std::vector<Stream> streams() const override;
  void release(Stream control) override;
  void retire() override;
  TransportStats stats() const override { return stats_; }

 private:
  struct Peer {
    std::unique_ptr<device::Link> link;  // made on first use
    bool used = false;
  };

  int placeOf(int rank) const { return places_[static_cast<size_t>(rank)]; }
  std::vector<int> placesOf(const std::vector<int>& ranks) const;
  void use(int peer);
  device::Link& link(int peer);
  void send(const Message& message, device::Fork& fork);
  void receive(const Message& message, device::Fork& fork);
  void runSchedule(const Collective& operation, const Buffers& buffers);
  void readPeers(const Collective& operation);
  void runMoves(const Step& step, const Call& call, const Buffers& buffers, Stream stream);

  const DevicePtr device_;
  const std::vector<int> places_;
  const int rank_;
  const int place_;
  const size_t landing_bytes_;
  std::unique_ptr<device::Arena> arena_;
  const std::shared_ptr<device::SharedBoard> board_;
  ScratchPool scratch_;
  std::byte* temp_ = nullptr;  // of the operation prepared last
  OwnedEvent step_event_;
  const DeviceCosts costs_;
  device::PeerReads reads_;
  std::vector<Peer> peers_;
  TransportStats stats_;
};

}  // namespace hdpcomm
