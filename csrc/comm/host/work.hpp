// One operation of one rank, from its submission to its end.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/inline_vector.hpp"
#include "collective/moves.hpp"
#include "comm/flight_recorder.hpp"
#include "kernels/reduce.hpp"
#include "transport/transport.hpp"

namespace hdpcomm {

using Ranks = std::shared_ptr<const std::vector<int>>;

class Work {
 public:
  enum class State : uint8_t {
    kQueued,
    kRunning,
    kPosted,  // running, and all of its messages are under way
    kDone,
    kFailed
  };

  Work(const Call& call, Ranks ranks) : call_(call), ranks_(std::move(ranks)) {}
  virtual ~Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  const Call& call() const { return call_; }
  const Ranks& ranks() const { return ranks_; }
  std::string describeCall() const { return describe(call_); }
  // Who waits for it keeps its error from the program.
  void keepQuiet() { quiet_ = true; }

 protected:
  friend class World;

  struct Numbers {
    int peer;  // global rank
    std::optional<uint32_t> send;
    std::optional<uint32_t> recv;
  };

  // Takes the numbers of the operation on each pair of ranks: at submission, so that they follow
  // the program's order.
  virtual void takeNumbers(Transport& transport) = 0;
  // Posts what can be posted, and returns whether there was anything; called again after every
  // progress.
  virtual bool advance(Transport& transport) = 0;
  const std::optional<Error>& failure() const {
    return completion_.failure ? completion_.failure : deferred_.failure;
  }
  bool underWay() const { return completion_.pending + deferred_.pending > 0; }
  bool complete() const { return !underWay() && allPosted(); }
  // True when nothing more will be posted, so that the next operation may post.
  virtual bool allPosted() const = 0;
  // Whether a transfer to or from the peer (a global rank) is still to be posted.
  virtual bool willNeed(int peer) const = 0;
  // The number of its first message to the peer of `numbers`.
  virtual std::optional<uint32_t> firstSend(const Numbers& numbers) const { return numbers.send; }
  // Enters it, or each of its messages, when it has its numbers: only what a program called.
  virtual void enter(FlightRecorder& /*recorder*/) {}

  Call call_;
  Ranks ranks_;
  InlineVector<Numbers, 4> numbers_;
  Completion completion_;  // of the current step
  Completion deferred_;    // of sends that may be in flight until the end
  State state_ = State::kQueued;
  std::optional<Error> error_;
  uint64_t failed_in_ = 0;                 // a period of HeardFailures
  std::optional<Clock::time_point> seen_;  // background: when a health check first saw it run
  Clock::time_point allowed_ = Clock::time_point::min();  // the latest deadline of those who waited
  int64_t seq_ = -1;
  FlightRecorder::Entry flight_;
  bool background_ = false;
  bool quiet_ = false;
};

// Runs a Schedule. `in` and `out` are its buffers.
class CollectiveWork final : public Work {
 public:
  CollectiveWork(Call call, Ranks ranks, std::shared_ptr<const Schedule> schedule, const void* in,
                 void* out);

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport& transport) override;
  bool allPosted() const override { return next_step_ == schedule_->steps.size(); }
  bool willNeed(int peer) const override;
  void enter(FlightRecorder& recorder) override { recorder.add(flight_, call_, *ranks_, seq_); }

 private:
  void post(const Step& step, Transport& transport);

  std::shared_ptr<const Schedule> schedule_;
  Buffers buffers_;
  std::unique_ptr<std::byte[]> temp_;
  ReduceFn reduce_ = nullptr;
  size_t element_bytes_;
  size_t next_step_ = 0;
};

struct Message {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::kUint8;
  int peer = -1;  // position in the ranks; checked by the caller
};

// One send or one receive, which `call` describes.
class MessageWork final : public Work {
 public:
  MessageWork(const Call& call, Ranks ranks, const Message& message, bool sends)
      : Work(call, std::move(ranks)),
        data_(message.data),
        bytes_(message.count * dtypeBytes(message.dtype)),
        peer_((*ranks_)[static_cast<size_t>(message.peer)]),
        sends_(sends) {}

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport& transport) override;
  bool allPosted() const override { return posted_; }
  bool willNeed(int) const override { return !posted_; }
  void enter(FlightRecorder& recorder) override {
    recorder.addMessage(flight_, call_, seq_, peer_, sends_, number_);
  }

 private:
  void* data_;
  size_t bytes_;
  int peer_;  // global rank
  uint32_t number_ = 0;
  bool sends_;
  bool posted_ = false;
};

// Brings the pairs of this rank with all of the ranks into step again.
class ResyncWork final : public Work {
 public:
  using Work::Work;

  // Pairs that fall out of step again meanwhile, since the peer failed with another rank, are
  // brought into step once more, instead of a failure: the peer calls resync() again, too.
  void keepOn() { keeps_on_ = true; }

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport& transport) override;
  // Later operations wait until it has ended: their messages count in the new numbers.
  bool allPosted() const override { return posted_ && completion_.pending == 0; }
  bool willNeed(int) const override { return true; }

 private:
  bool posted_ = false;
  bool keeps_on_ = false;
};

// Sends and receives, all posted at once.
class ExchangeWork final : public Work {
 public:
  ExchangeWork(const Call& call, Ranks ranks, std::span<const Message> sends,
               std::span<const Message> recvs);

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport& transport) override;
  bool allPosted() const override { return posted_; }
  bool willNeed(int) const override { return !posted_; }
  std::optional<uint32_t> firstSend(const Numbers& numbers) const override;
  void enter(FlightRecorder& recorder) override;

 private:
  template <typename Request>
  Request& add(InlineVector<Request, 2>& requests, const Message& message);
  Numbers& numbersOf(int peer);

  InlineVector<SendRequest, 2> sends_;
  InlineVector<RecvRequest, 2> recvs_;
  bool posted_ = false;
};

}  // namespace hdpcomm
