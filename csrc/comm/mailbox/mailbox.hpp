// Messages with labels (a context and a tag), and receives from any of several ranks, in a world of
// their own: the transport matches the messages of a pair of ranks in order.
//
// A send is two messages of the transport: a header (label, count, type) and the payload. Where a
// receive is posted, the channel of each rank from which it may come takes one header, finds the
// first posted receive that wants it, and receives the payload straight into its buffer; what none
// wants is kept (an unexpected message) for a later one. A channel takes messages only while a
// posted receive could want one of its rank's, so what a rank must keep is bounded by what its
// peers send while it waits for something else.
//
// There is no thread for this: whoever moves the world (a caller that waits, the world's thread for
// what nobody waits for) also matches, under the world's lock.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/host/world.hpp"

namespace hdpcomm {

class MailboxState;  // mailbox_state.hpp

// What a send and its receive must have in common, beside ranks, size and type.
struct Label {
  int64_t context = 0;
  int64_t tag = 0;

  bool operator==(const Label&) const = default;
};

// A message that was sent or a receive that was posted.
class LabelledWork : public Work {
 public:
  LabelledWork(const Call& call, Ranks ranks, const Message& message, const Label& label,
               MailboxState* mail)
      : Work(call, std::move(ranks)), message_(message), label_(label), mail_(mail) {}

  const Message& message() const { return message_; }
  const Label& label() const { return label_; }
  size_t bytes() const { return message_.count * dtypeBytes(message_.dtype); }
  // The sender of a receive, a rank of the world, once it is known; else -1.
  virtual int source() const { return -1; }
  virtual bool receives() const = 0;
  // The only rank that can end it, or -1.
  virtual int peer() const = 0;
  // "to send tag 3 to rank 1; look for the receive"
  virtual std::string purpose() const = 0;

  // Failed, or about to be found failed by the world.
  bool failed() const { return state_ == State::kFailed || failure().has_value(); }
  // Ends it under the world's lock; the world notices in the same pass.
  void end() { completion_.pending = 0; }
  void end(const Error& error) { completion_.failure = error; }

 protected:
  Message message_;  // the peer is a rank of the world
  Label label_;
  MailboxState* mail_;  // used by the world only, which keeps it alive
};

class Mailbox {
 public:
  // At most one a world, in which nothing else sends or receives messages.
  explicit Mailbox(std::shared_ptr<World> world);

  // Starts to send; `message.peer` is a rank of the world. It ends when the receiver has taken it.
  std::shared_ptr<LabelledWork> send(const Message& message, const Label& label) const;
  // Posts a receive from one of the given ranks of the world (`buffer.peer` does not matter).
  std::shared_ptr<LabelledWork> receive(const Message& buffer, std::vector<int> sources,
                                        const Label& label) const;

  // As World::wait(); the error of a timeout names what was awaited and lists the unexpected
  // messages. A receive that no message had matched is withdrawn: a later message for it is kept.
  void wait(LabelledWork& work, double timeout_s, const World::InterruptCheck& check) const;
  bool test(LabelledWork& work) const { return world_->test(work); }

 private:
  void checkRank(int rank, const char* call) const;

  std::shared_ptr<World> world_;
  Ranks everyone_;
  std::shared_ptr<MailboxState> state_;
};

}  // namespace hdpcomm
