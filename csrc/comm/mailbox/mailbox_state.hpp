// The receiving side of a Mailbox. All of it is used under the world's lock.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mailbox/mailbox.hpp"

namespace hdpcomm {

// The message of the transport that precedes the payload.
struct MailHeader {
  Label label;
  uint64_t count = 0;
  uint64_t dtype = 0;
};

class LabelledSend final : public LabelledWork, public std::enable_shared_from_this<LabelledSend> {
 public:
  using LabelledWork::LabelledWork;

  bool receives() const override { return false; }
  int peer() const override { return message_.peer; }
  std::string purpose() const override;

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport& transport) override;
  bool allPosted() const override { return posted_; }
  bool willNeed(int) const override { return !posted_; }
  std::optional<uint32_t> firstSend(const Numbers&) const override { return header_number_; }

 private:
  MailHeader header_;
  uint32_t header_number_ = 0;
  uint32_t number_ = 0;
  bool posted_ = false;
};

class LabelledReceive final : public LabelledWork,
                              public std::enable_shared_from_this<LabelledReceive> {
 public:
  // `sources`: sorted.
  LabelledReceive(const Call& call, Ranks ranks, const Message& buffer, const Label& label,
                  MailboxState* mail, std::vector<int> sources)
      : LabelledWork(call, std::move(ranks), buffer, label, mail), sources_(std::move(sources)) {}

  int source() const override { return source_; }
  bool receives() const override { return true; }
  int peer() const override { return sources_.size() == 1 ? sources_[0] : -1; }
  std::string purpose() const override;

  const std::vector<int>& sources() const { return sources_; }
  bool from(int rank) const;
  bool wants(int rank, const Label& label) const { return label == label_ && from(rank); }

  // Waits for a message (again).
  void unmatch();
  // The request of the payload of a message that it wants.
  RecvRequest match(int source, uint32_t number);
  // Copies a message out of memory; false, and the receive has failed, where size or type differ.
  bool take(int source, const Message& message);
  // True when no part of its payload is under way.
  bool idle() const { return completion_.pending == 0; }
  bool hasFailed() const { return state_ == State::kFailed; }
  const std::optional<Error>& payloadFailure() const { return completion_.failure; }
  void withdraw(Transport& transport) { transport.cancel(&completion_); }

 protected:
  void takeNumbers(Transport& transport) override;
  bool advance(Transport&) override { return false; }
  bool allPosted() const override { return true; }
  bool willNeed(int) const override { return false; }

 private:
  std::vector<int> sources_;
  int source_ = -1;
};

class MailboxState final : public WorldListener {
 public:
  MailboxState(int rank, int size, const Call& call) : rank_(rank), call_(call), channels_(size) {}

  int rank() const { return rank_; }
  // What both ends of a message of the transport name.
  Call callOf(uint64_t count, DType dtype) const;

  // Gives a new receive its unexpected message, if there is one, or lets it wait.
  void post(const std::shared_ptr<LabelledReceive>& receive);
  // A message of this rank to itself.
  void sendToSelf(const std::shared_ptr<LabelledSend>& send);
  bool advance(Transport& transport) override;
  // The unexpected messages, for the text of an error.
  std::string describeUnexpected() const;

 private:
  enum class Stage : uint8_t { kIdle, kHeader, kPayload };

  struct Channel {
    Stage stage = Stage::kIdle;
    bool active = false;  // in active_
    MailHeader header;
    Completion completion;                     // of the header, or of a payload that nobody wanted
    std::shared_ptr<LabelledReceive> receive;  // of the payload
    std::unique_ptr<std::byte[]> kept;         // the same, where nobody wanted it
    std::optional<Error> lost;                 // the rank has left or died, or is out of step
  };

  // A message that no posted receive wanted when it came.
  struct Unexpected {
    Message message;  // from its peer
    Label label;
    std::unique_ptr<std::byte[]> payload;
    std::shared_ptr<LabelledSend> local;  // of this rank, not copied yet
  };

  bool advance(int peer, Transport& transport);
  // These return whether the channel may go on at once.
  bool takeHeader(int peer, Transport& transport);
  bool takePayload(int peer, Transport& transport);
  bool takeUnexpected(int peer, Transport& transport);
  void receiveHeader(int peer, Transport& transport);
  void receivePayload(int peer, Transport& transport);

  bool wanted(int peer) const;
  std::shared_ptr<LabelledReceive> match(int source, const Label& label);
  void activate(int peer);
  void markLost(int peer, const Error& error);
  // Why no source of a receive can send any more; null while one can.
  const Error* lossOf(const LabelledReceive& receive) const;

  int rank_;
  Call call_;
  std::vector<Channel> channels_;  // by rank; never resized, since requests point there
  std::vector<int> active_;
  std::deque<std::shared_ptr<LabelledReceive>> posted_;  // in the order of the calls
  std::deque<Unexpected> unexpected_;                    // in the order of arrival
};

}  // namespace hdpcomm
