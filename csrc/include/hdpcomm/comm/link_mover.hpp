// Messages over links: pairs of ranks whose arenas are mapped (transport/device). One host only.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "hdpcomm/collective/peer_reads.hpp"
#include "hdpcomm/comm/scratch.hpp"
#include "hdpcomm/comm/stream_mover.hpp"
#include "hdpcomm/transport/device/call_board.hpp"
#include "hdpcomm/transport/device/link.hpp"
#include "hdpcomm/transport/device/peer_reads.hpp"

namespace hdpcomm {

class StreamEngine;

class LinkMover final : public StreamMover {
 public:
  LinkMover(DevicePtr device, std::unique_ptr<device::Arena> arena,
            std::shared_ptr<device::SharedBoard> board, const DeviceCosts& costs, int num_ranks,
            int rank);

  const char* name() const override { return device_->isSim() ? "sim" : "cuda"; }
  std::byte* landing() const override { return arena_->landing(rank_); }
  size_t landingBytes() const override { return arena_->config().landing_bytes; }
  size_t scratchBytes() const override { return scratch_.bytes(); }
  Communicator::Planning planning() const override;
  Traffic trafficOf(const Collective& operation) const override;
  void prepare(const Messages& sends, const Messages& recvs) override;
  void prepare(const Collective& operation) override;
  std::vector<Stream> exchange(const Exchange& operation, const Look& look) override;
  void collective(const Collective& operation, const Look& look) override;
  std::vector<Stream> streams() const override;
  void release(Stream control) override;
  void retire() override;
  TransportStats stats() const override { return stats_; }

 private:
  // In, out and temporary memory of a schedule, by Buffer.
  using Buffers = std::array<std::byte*, 3>;
  struct Peer {
    std::unique_ptr<device::Link> link;  // made on first use
    bool used = false;
  };

  void use(int peer);
  device::Link& link(int peer);
  void checkLanding(const Message& message, bool received) const;
  void send(const Message& message, device::Fork& fork);
  void receive(const Message& message, device::Fork& fork);
  void runSchedule(const Collective& operation, const Buffers& buffers);
  void readPeers(const Collective& operation);
  void runMoves(const Step& step, const Call& call, const Buffers& buffers, Stream stream);

  const DevicePtr device_;
  const int rank_;
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

// Collective over the host world of `comm`, whose transport carries the addresses. All ranks give
// the same configuration. Throws Mismatch where they differ, InvalidUsage where devices cannot
// reach each other. The costs of rank 0 are everybody's, so that all choose alike.
std::shared_ptr<StreamEngine> joinLinks(const Communicator& comm, DevicePtr device,
                                        const device::ArenaConfig& config, DeviceCosts costs);

}  // namespace hdpcomm
