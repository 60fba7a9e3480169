#include "transport/host/composite.hpp"

#include <utility>

namespace hdpcomm {
namespace {

class CompositeTransport final : public Transport {
 public:
  CompositeTransport(std::vector<std::unique_ptr<Transport>> members, std::vector<int> route,
                     std::string name)
      : members_(std::move(members)), route_(std::move(route)), name_(std::move(name)) {
    for (const int member : route_) {
      if (member < 0 || member >= static_cast<int>(members_.size())) {
        throwInvalidUsage("a route names transport " + std::to_string(member) + " of " +
                          std::to_string(members_.size()));
      }
    }
    for (const auto& member : members_) {
      if (member->size() != static_cast<int>(route_.size()) || member->rank() != rank()) {
        throwInvalidUsage("the transports of a composite must have one world and one rank");
      }
    }
  }

  const char* name() const noexcept override { return name_.c_str(); }
  int rank() const noexcept override { return members_[0]->rank(); }
  int size() const noexcept override { return static_cast<int>(route_.size()); }
  uint32_t nextSendNumber(int peer) override { return to(peer).nextSendNumber(peer); }
  uint32_t nextRecvNumber(int peer) override { return to(peer).nextRecvNumber(peer); }
  void postSend(const SendRequest& request) override { to(request.peer).postSend(request); }
  void postRecv(const RecvRequest& request) override { to(request.peer).postRecv(request); }
  bool progress() override {
    bool moved = false;
    for (const auto& member : members_) moved |= member->progress();
    return moved;
  }
  void rejectUnexpected(int peer, uint32_t number, const Call& call,
                        Completion* completion) override {
    to(peer).rejectUnexpected(peer, number, call, completion);
  }
  void cancel(const Completion* completion) override {
    for (const auto& member : members_) member->cancel(completion);
  }
  std::vector<int> awaited(const Completion* completion) override {
    std::vector<int> ranks;
    for (const auto& member : members_) {
      const std::vector<int> more = member->awaited(completion);
      ranks.insert(ranks.end(), more.begin(), more.end());
    }
    return ranks;
  }
  void notifyFailure(int peer, const Error& error, std::optional<uint32_t> first_send,
                     std::optional<uint32_t> send_number,
                     std::optional<uint32_t> recv_number) override {
    to(peer).notifyFailure(peer, error, first_send, send_number, recv_number);
  }
  std::optional<Error> outOfStep(int peer) override { return to(peer).outOfStep(peer); }
  void restartNumbers(int peer) override { to(peer).restartNumbers(peer); }
  void postResync(int peer, Completion* completion) override {
    to(peer).postResync(peer, completion);
  }
  std::optional<Error> lost(int peer, std::optional<uint32_t> send_number,
                            std::optional<uint32_t> recv_number, bool needed) override {
    return to(peer).lost(peer, send_number, recv_number, needed);
  }
  void checkPeers() override {
    for (const auto& member : members_) member->checkPeers();
  }
  std::optional<Error> departure(int peer) override { return to(peer).departure(peer); }
  uint32_t idleTicket() override { return members_[0]->idleTicket(); }
  void idle(uint32_t ticket, Clock::time_point until) override { members_[0]->idle(ticket, until); }
  std::function<void()> waker() override { return members_[0]->waker(); }
  bool oversubscribed() const noexcept override {
    for (const auto& member : members_) {
      if (member->oversubscribed()) return true;
    }
    return false;
  }
  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    return members_[0]->allocate(bytes);
  }
  WaitPlace* waitPlace(int rank) override { return to(rank).waitPlace(rank); }
  std::shared_ptr<CounterWords> counterWords(int rank) override {
    return to(rank).counterWords(rank);
  }
  std::unique_ptr<RemoteFetch> startFetch(int rank, const FetchRequest& request) override {
    return to(rank).startFetch(rank, request);
  }
  uint64_t moves() const override {
    uint64_t sum = 0;
    for (const auto& member : members_) sum += member->moves();
    return sum;
  }
  void publishPulse(const Pulse& pulse) override {
    for (const auto& member : members_) member->publishPulse(pulse);
  }
  std::optional<Pulse> pulse(int peer) override { return to(peer).pulse(peer); }
  Stats stats() const override {
    Stats sum;
    for (const auto& member : members_) addStats(sum, member->stats());
    return sum;
  }
  void close(const std::string& reason) noexcept override {
    for (const auto& member : members_) member->close(reason);
  }

 private:
  Transport& to(int peer) const {
    return *members_[static_cast<size_t>(route_[static_cast<size_t>(peer)])];
  }

  std::vector<std::unique_ptr<Transport>> members_;
  std::vector<int> route_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Transport> makeCompositeTransport(std::vector<std::unique_ptr<Transport>> members,
                                                  std::vector<int> route, const std::string& name) {
  if (members.empty()) throwInvalidUsage("a composite needs at least one transport");
  return std::make_unique<CompositeTransport>(std::move(members), std::move(route), name);
}

}  // namespace hdpcomm
