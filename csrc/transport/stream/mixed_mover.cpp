#include "transport/stream/mixed_mover.hpp"

namespace hdpcomm {
namespace {

// The steps of a schedule over links, while NcclWorld runs the rest.
class LinkedSteps final : public NcclWorld::Beside {
 public:
  LinkedSteps(LinkMover& links, const StreamMover::Collective& operation)
      : pass_(links, operation), operation_(operation) {}
  void begin(const Step& step, std::byte* temp) override {
    pass_.begin(step, {operation_.in, operation_.out, temp});
  }
  void end() override { pass_.end(); }
  void finish() override { pass_.finish(); }

 private:
  LinkMover::Pass pass_;
  const StreamMover::Collective& operation_;
};

}  // namespace

MixedMover::MixedMover(const DevicePtr& device, std::shared_ptr<const LinkMap> map,
                       std::unique_ptr<LinkMover> links, std::unique_ptr<NcclMover> nccl,
                       const TransportCosts& link_costs, const NcclCosts& nccl_costs, int rank)
    : sim_(device->isSim()),
      map_(std::move(map)),
      links_(std::move(links)),
      nccl_(std::move(nccl)),
      inside_(map_->wholeHosts() ? link_costs : nccl_costs.inside),
      between_(nccl_costs.between),
      rank_(rank) {}

size_t MixedMover::scratchBytes() const {
  return nccl_->scratchBytes() + (links_ != nullptr ? links_->scratchBytes() : 0);
}

PlanningRules MixedMover::planning(const std::vector<int>& ranks) const {
  if (map_->all(ranks)) return links_->planning(ranks);
  return {.choose = [this](const ScheduleRequest& request) {
    return chooseAlgorithm(request, inside_, between_);
  }};
}

StreamMover::Zone MixedMover::zoneFor(int source) const {
  const bool by_nccl = source < 0 ? links_ == nullptr : !linked(source);
  if (by_nccl) return nccl_->zoneFor(source);
  return links_ != nullptr ? links_->zoneFor(source) : Zone{};
}

StreamMover::Traffic MixedMover::trafficOf(const Collective& operation) const {
  return operation.plan.schedule != nullptr ? StreamMover::trafficOf(operation)
                                            : links_->trafficOf(operation);
}

MixedMover::Parted MixedMover::part(const Messages& messages) const {
  Parted parted;
  for (const Message& message : messages) {
    if (message.landing != kNoLanding && !lands(message.peer)) {
      throwInvalidUsage("exchange() got a landing place for a message with rank " +
                        std::to_string(message.peer) + ", to which rank " + std::to_string(rank_) +
                        " has no link: give one only where Communicator.lands() is true");
    }
    (linked(message.peer) ? parted.linked : parted.others).push_back(message);
  }
  return parted;
}

void MixedMover::prepare(const Messages& sends, const Messages& recvs, bool captured) {
  Parted outgoing = part(sends);
  Parted incoming = part(recvs);
  if (links_ != nullptr) links_->prepare(outgoing.linked, incoming.linked, captured);
  nccl_->prepare(outgoing.others, incoming.others, captured);
  sends_ = std::move(outgoing);
  recvs_ = std::move(incoming);
}

void MixedMover::prepare(const Collective& operation) {
  map_->all(operation.ranks) ? links_->prepare(operation) : nccl_->prepare(operation);
}

std::vector<Stream> MixedMover::exchange(const Exchange& operation, const Look& look) {
  std::vector<Stream> streams;
  if (!sends_.linked.empty() || !recvs_.linked.empty()) {
    streams = links_->exchange(
        {sends_.linked, recvs_.linked, operation.begin, operation.caller, operation.background},
        look);
  }
  if (!sends_.others.empty() || !recvs_.others.empty()) {
    const std::vector<Stream> others = nccl_->exchange(
        {sends_.others, recvs_.others, operation.begin, operation.caller, operation.background},
        look);
    streams.insert(streams.end(), others.begin(), others.end());
  }
  return streams;
}

void MixedMover::collective(const Collective& operation, const Look& look) {
  if (map_->all(operation.ranks)) return links_->collective(operation, look);
  if (links_ == nullptr) return nccl_->collective(operation, look);
  LinkedSteps steps(*links_, operation);
  nccl_->collective(operation, &steps, look);
}

std::vector<Stream> MixedMover::streams() const {
  std::vector<Stream> streams = nccl_->streams();
  if (links_ == nullptr) return streams;
  const std::vector<Stream> lanes = links_->streams();
  streams.insert(streams.end(), lanes.begin(), lanes.end());
  return streams;
}

// The flags first: the end of a communicator waits for its kernels, and streams hold those up that
// wait for a flag.
void MixedMover::release(Stream control) {
  if (links_ != nullptr) links_->release(control);
  nccl_->release(control);
}

void MixedMover::retire() {
  nccl_->retire();
  if (links_ != nullptr) links_->retire();
}

TransportStats MixedMover::stats() const {
  TransportStats stats = nccl_->stats();
  if (links_ == nullptr) return stats;
  const TransportStats linked = links_->stats();
  stats.bytes_sent += linked.bytes_sent;
  stats.bytes_received += linked.bytes_received;
  stats.messages_sent += linked.messages_sent;
  stats.messages_received += linked.messages_received;
  stats.peers_used += linked.peers_used;  // others than NCCL's
  return stats;
}

}  // namespace hdpcomm
