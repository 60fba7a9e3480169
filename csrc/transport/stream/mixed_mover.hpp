// Each message the way that its peer has: over links to the ranks of this host that this rank's
// device reaches, by NCCL to all others. The two movers do the work; this one splits it.
//
//   exchange     one group of NCCL for the peers without a link, lanes for those with one
//   collective   members all linked: LinkMover does it, with peers' reads, and NCCL hears nothing;
//                else step by step: the transfers over links leave for their lanes, the others
//                are one group on the operation's stream, and both join before the next step
//
// The whole world in its own order goes to NCCL's own collectives for kAuto, as in NcclMover: that
// is one launch that uses all NICs of a host and knows its links, where a schedule is a launch for
// each step. No costs of ours describe it, so there is nothing to weigh.
#pragma once

#include <memory>
#include <vector>

#include "transport/stream/links/link_map.hpp"
#include "transport/stream/links/link_mover.hpp"
#include "transport/stream/nccl/nccl_mover.hpp"

namespace hdpcomm {

class MixedMover final : public StreamMover {
 public:
  // `links`: null on a rank that has none. The world of `nccl` leaves the linked peers out.
  MixedMover(const DevicePtr& device, std::shared_ptr<const LinkMap> map,
             std::unique_ptr<LinkMover> links, std::unique_ptr<NcclMover> nccl,
             const TransportCosts& link_costs, const NcclCosts& nccl_costs, int rank);

  const char* name() const override { return sim_ ? "sim+nccl" : "cuda+nccl"; }
  Zone zone() const override { return links_ != nullptr ? links_->zone() : Zone{}; }
  bool lands(int peer) const override { return linked(peer) || nccl_->lands(peer); }
  size_t scratchBytes() const override;
  size_t arenaBytes() const override { return links_ != nullptr ? links_->arenaBytes() : 0; }
  PlanningRules planning(const std::vector<int>& ranks) const override;
  Traffic trafficOf(const Collective& operation) const override;
  bool capturesAlike(int peer) const override { return !linked(peer); }
  std::unique_ptr<PreparedExchange> prepare(const Exchange& operation) override;
  std::unique_ptr<PreparedCollective> prepare(const Collective& operation) override;
  std::vector<Stream> streams() const override;
  void checkHealth() override { nccl_->checkHealth(); }
  void release(Stream control) override;
  void deviceLost() override { nccl_->deviceLost(); }
  void retire() override;
  Stats stats() const override;

 private:
  class MixedExchange;
  bool linked(int peer) const { return map_->linked(rank_, peer); }

  const bool sim_;
  const std::shared_ptr<const LinkMap> map_;
  const std::unique_ptr<LinkMover> links_;
  const std::unique_ptr<NcclMover> nccl_;
  const TransportCosts inside_;  // of messages inside a host
  const TransportCosts between_;
  const int rank_;
};

}  // namespace hdpcomm
