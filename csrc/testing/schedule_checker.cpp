#include "testing/schedule_checker.hpp"

#include <deque>
#include <map>
#include <random>
#include <utility>

#include "testing/schedule_checked_part.hpp"

namespace hdpcomm::testing {
namespace {

struct PostedSend {
  size_t operation;
  CheckedPart* part;
  Span span;
  Values snapshot;
  int* pending;
};

struct PostedRecv {
  size_t operation;
  CheckedPart* part;
  Recv recv;
  int* pending;
};

struct RunningPart {
  size_t operation = 0;
  CheckedPart* part = nullptr;
  size_t next_step = 0;
  int pending = 0;   // of the current step
  int deferred = 0;  // sends that may be in flight until the end
};

class Run {
 public:
  Run(int num_ranks, const std::vector<CheckedOperation>& operations, uint64_t seed, Fault fault)
      : num_ranks_(num_ranks),
        operations_(operations),
        random_(seed),
        queues_(static_cast<size_t>(num_ranks)) {
    for (size_t i = 0; i < operations.size(); ++i) {
      for (size_t j = 0; j < operations[i].ranks.size(); ++j) {
        const bool faulty =
            i == 0 && (j + 1 == operations[i].ranks.size() || fault == Fault::kBlockingSends);
        parts_.emplace_back(operations[i], static_cast<int>(j), faulty ? fault : Fault::kNone);
        queues_[static_cast<size_t>(operations[i].ranks[j])].push_back(
            {i, &parts_.back(), 0, 0, 0});
      }
    }
  }

  void execute() {
    for (int rank = 0; rank < num_ranks_; ++rank) advance(rank);
    while (!ready_.empty()) {
      const size_t pick = std::uniform_int_distribution<size_t>(0, ready_.size() - 1)(random_);
      const auto pair = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      match(pair.first, pair.second);
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!queues_[static_cast<size_t>(rank)].empty()) throw Failure(stuck());
    }
    for (CheckedPart& part : parts_) part.checkResult();
  }

 private:
  using Pair = std::pair<int, int>;

  // Posts what a rank may post; ends its operation when all has ended.
  void advance(int rank) {
    auto& queue = queues_[static_cast<size_t>(rank)];
    while (!queue.empty()) {
      RunningPart& running = queue.front();
      const auto& steps = running.part->schedule().steps;
      if (running.pending > 0) return;
      if (running.next_step < steps.size()) {
        post(rank, running, steps[running.next_step++]);
      } else if (running.deferred > 0) {
        return;
      } else {
        queue.pop_front();
      }
    }
  }

  void post(int rank, RunningPart& running, const Step& step) {
    for (const Move& move : step.moves) running.part->move(move);
    const auto& ranks = operations_[running.operation].ranks;
    for (const Recv& recv : step.recvs) {
      const int peer = ranks.at(static_cast<size_t>(recv.peer));
      ++running.pending;
      recvs_[{peer, rank}].push_back({running.operation, running.part, recv, &running.pending});
      becomeReady({peer, rank}, recvs_[{peer, rank}].size() == 1);
    }
    for (const Send& send : step.sends) {
      const int peer = ranks.at(static_cast<size_t>(send.peer));
      int& pending = send.deferred ? running.deferred : running.pending;
      ++pending;
      sends_[{rank, peer}].push_back(
          {running.operation, running.part, send.from, running.part->read(send.from), &pending});
      becomeReady({rank, peer}, sends_[{rank, peer}].size() == 1);
    }
  }

  void becomeReady(Pair pair, bool first) {
    if (first && !sends_[pair].empty() && !recvs_[pair].empty()) ready_.push_back(pair);
  }

  void match(int source, int target) {
    auto& sends = sends_[{source, target}];
    auto& recvs = recvs_[{source, target}];
    PostedSend send = std::move(sends.front());
    sends.pop_front();
    const PostedRecv recv = recvs.front();
    recvs.pop_front();
    const std::string pair =
        " (rank " + std::to_string(source) + " to " + std::to_string(target) + ")";
    if (send.operation != recv.operation) throw Failure("messages of two operations meet" + pair);
    const Values now = send.part->read(send.span);
    if (now != send.snapshot) throw Failure("a span changes while it is sent" + pair);
    if (now.size() != recv.recv.to.bytes) throw Failure("a message does not fit" + pair);
    if (recv.recv.reduce) {
      recv.part->reduce(recv.recv.to, recv.recv.operand, now);
    } else {
      recv.part->write(recv.recv.to, now);
    }
    --*send.pending;
    --*recv.pending;
    if (!sends.empty() && !recvs.empty()) ready_.push_back({source, target});
    advance(source);
    advance(target);
  }

  std::string stuck() const {
    std::string text = "ranks wait in a circle:";
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto& queue = queues_[static_cast<size_t>(rank)];
      if (queue.empty()) continue;
      text += " " + std::to_string(rank) + " in step " + std::to_string(queue.front().next_step) +
              " of operation " + std::to_string(queue.front().operation);
    }
    return text;
  }

  int num_ranks_;
  const std::vector<CheckedOperation>& operations_;
  std::mt19937_64 random_;
  std::deque<CheckedPart> parts_;
  std::vector<std::deque<RunningPart>> queues_;
  std::map<Pair, std::deque<PostedSend>> sends_;
  std::map<Pair, std::deque<PostedRecv>> recvs_;
  std::vector<Pair> ready_;
};

}  // namespace

std::string checkOperations(int num_ranks, const std::vector<CheckedOperation>& operations,
                            uint64_t seed, Fault fault) {
  try {
    Run(num_ranks, operations, seed, fault).execute();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace hdpcomm::testing
