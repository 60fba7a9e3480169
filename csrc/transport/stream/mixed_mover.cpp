#include "transport/stream/mixed_mover.hpp"

#include <string>
#include <utility>

#include "base/error.hpp"

namespace hdpcomm {

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

StreamMover::Traffic MixedMover::trafficOf(const Collective& operation) const {
  return operation.plan.schedule != nullptr ? StreamMover::trafficOf(operation)
                                            : links_->trafficOf(operation);
}

// An exchange over links and one by NCCL, each with the messages of its peers.
class MixedMover::MixedExchange final : public PreparedExchange {
 public:
  MixedExchange(const MixedMover& mover, const Exchange& operation) {
    split(mover, operation.sends, &Part::sends);
    split(mover, operation.recvs, &Part::recvs);
    if (mover.links_ != nullptr) linked_.prepare(*mover.links_, operation);
    others_.prepare(*mover.nccl_, operation);
  }

  std::vector<End> enqueue(Event begin, const WaitCheck& check) && override {
    std::vector<End> ends;
    for (Part* part : {&linked_, &others_}) {
      if (part->prepared == nullptr) continue;
      const auto more = std::move(*part->prepared).enqueue(begin, check);
      ends.insert(ends.end(), more.begin(), more.end());
    }
    return ends;
  }

 private:
  struct Part {
    Messages sends;
    Messages recvs;
    std::unique_ptr<PreparedExchange> prepared;  // null: no messages

    void prepare(StreamMover& mover, const Exchange& whole) {
      if (sends.empty() && recvs.empty()) return;
      prepared =
          mover.prepare(Exchange{sends, recvs, whole.caller, whole.background, whole.captured});
    }
  };

  void split(const MixedMover& mover, const Messages& messages, Messages Part::* side) {
    for (const Message& message : messages) {
      if (message.landing != kNoLanding && !mover.lands(message.peer)) {
        throwInvalidUsage("exchange() got a landing place for a message with rank " +
                          std::to_string(message.peer) + ", to which rank " +
                          std::to_string(mover.rank_) +
                          " has no link: give one only where Communicator.lands() is true");
      }
      ((mover.linked(message.peer) ? linked_ : others_).*side).push_back(message);
    }
  }

  Part linked_;
  Part others_;
};

std::unique_ptr<StreamMover::PreparedExchange> MixedMover::prepare(const Exchange& operation) {
  return std::make_unique<MixedExchange>(*this, operation);
}

// Where only some members are linked, the transfers over links start before NCCL's group, which
// holds the stream until all of its peers have come, and join the stream after it.
std::unique_ptr<StreamMover::PreparedCollective> MixedMover::prepare(const Collective& operation) {
  if (map_->all(operation.ranks)) return links_->prepare(operation);
  if (links_ == nullptr || nccl_->runsWhole(operation)) return nccl_->prepare(operation);
  std::unique_ptr<ScheduleRunner> runner = nccl_->prepareSchedule(operation);
  runner->add(links_->transfersOf(runner->run()));
  return runner;
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

// No peer is counted twice: each has a link, or messages by NCCL.
Stats MixedMover::stats() const {
  Stats stats = nccl_->stats();
  if (links_ != nullptr) addStats(stats, links_->stats());
  return stats;
}

}  // namespace hdpcomm
