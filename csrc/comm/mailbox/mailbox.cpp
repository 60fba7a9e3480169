#include "comm/mailbox/mailbox.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "comm/mailbox/mailbox_state.hpp"

namespace hdpcomm {
namespace {

std::string describe(const Message& message) {
  return std::to_string(message.count) + " x " + dtypeName(message.dtype);
}

}  // namespace

// --- sends

std::string LabelledSend::purpose() const {
  return "to send tag " + std::to_string(label_.tag) + " to rank " + std::to_string(message_.peer) +
         "; look for the receive";
}

void LabelledSend::takeNumbers(Transport& transport) {
  if (message_.peer == mail_->rank()) {
    posted_ = true;
    completion_.pending = 1;
    mail_->sendToSelf(shared_from_this());
    return;
  }
  header_ = {label_, message_.count, static_cast<uint64_t>(message_.dtype)};
  header_number_ = transport.nextSendNumber(message_.peer);
  number_ = transport.nextSendNumber(message_.peer);
  numbers_.push_back({message_.peer, number_, {}});
}

bool LabelledSend::advance(Transport& transport) {
  if (posted_) return false;
  posted_ = true;
  // One operation, so that both or neither are given up.
  transport.postSend({.peer = message_.peer,
                      .data = &header_,
                      .bytes = sizeof header_,
                      .number = header_number_,
                      .confirm = false,
                      .call = mail_->callOf(sizeof header_, DType::kUint8),
                      .completion = &completion_});
  transport.postSend({.peer = message_.peer,
                      .data = message_.data,
                      .bytes = bytes(),
                      .number = number_,
                      .confirm = true,
                      .call = call_,
                      .completion = &completion_});
  return true;
}

// --- receives

std::string LabelledReceive::purpose() const {
  return "to receive tag " + std::to_string(label_.tag) + " from rank " +
         (sources_.size() == 1 ? "" : "any of ") + listOf(sources_) + "; look for the send";
}

bool LabelledReceive::from(int rank) const {
  return std::binary_search(sources_.begin(), sources_.end(), rank);
}

void LabelledReceive::takeNumbers(Transport&) {
  numbers_.push_back({mail_->rank(), {}, {}});
  mail_->post(shared_from_this());
}

void LabelledReceive::unmatch() {
  completion_ = {.pending = 1, .failure = {}};
  source_ = -1;
  numbers_[0] = {mail_->rank(), {}, {}};  // no pair: nobody has to hear when it is given up
}

RecvRequest LabelledReceive::match(int source, uint32_t number) {
  completion_ = {};
  source_ = source;
  numbers_[0] = {source, {}, number};
  RecvRequest request;
  request.peer = source;
  request.data = message_.data;
  request.bytes = bytes();
  request.number = number;
  request.call = call_;
  request.completion = &completion_;
  return request;
}

bool LabelledReceive::take(int source, const Message& message) {
  source_ = source;
  if (message.count != message_.count || message.dtype != message_.dtype) {
    end(Error(ErrorKind::kMismatch,
              "rank " + std::to_string(mail_->rank()) + " receives " + describe(message_) +
                  " with tag " + std::to_string(label_.tag) + ", but rank " +
                  std::to_string(source) + " sent " + describe(message) +
                  ": give both the same size and type",
              {.rank = mail_->rank(), .peer = source, .op = {}, .ranks = {}, .seq = -1}));
    return false;
  }
  if (bytes() > 0) std::memcpy(message_.data, message.data, bytes());
  end();
  return true;
}

// --- the mailbox

Mailbox::Mailbox(std::shared_ptr<World> world) : world_(std::move(world)) {
  std::vector<int> ranks(static_cast<size_t>(world_->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  everyone_ = std::make_shared<const std::vector<int>>(std::move(ranks));
  Call call;
  call.group_size = static_cast<uint16_t>(world_->size());
  state_ = std::make_shared<MailboxState>(world_->rank(), world_->size(), call);
  world_->listen(state_);
}

void Mailbox::checkRank(int rank, const char* call) const {
  if (rank >= 0 && rank < world_->size()) return;
  throwInvalidUsage(std::string(call) + "() got rank " + std::to_string(rank) +
                    "; this world has ranks 0.." + std::to_string(world_->size() - 1));
}

std::shared_ptr<LabelledWork> Mailbox::send(const Message& message, const Label& label) const {
  checkRank(message.peer, "send");
  auto work = std::make_shared<LabelledSend>(state_->callOf(message.count, message.dtype),
                                             everyone_, message, label, state_.get());
  world_->submit(work);
  return work;
}

std::shared_ptr<LabelledWork> Mailbox::receive(const Message& buffer, std::vector<int> sources,
                                               const Label& label) const {
  if (sources.empty()) throwInvalidUsage("recv() got no ranks; give at least one");
  for (const int source : sources) checkRank(source, "recv");
  std::sort(sources.begin(), sources.end());
  auto work =
      std::make_shared<LabelledReceive>(state_->callOf(buffer.count, buffer.dtype), everyone_,
                                        buffer, label, state_.get(), std::move(sources));
  world_->submit(work);
  return work;
}

void Mailbox::wait(LabelledWork& work, double timeout_s, const World::InterruptCheck& check) const {
  if (!(timeout_s > 0)) timeout_s = world_->timeout();
  const auto start = Clock::now();
  try {
    world_->wait(work, timeout_s, check);
  } catch (const Error& error) {
    const double waited_s = std::chrono::duration<double>(Clock::now() - start).count();
    if (error.kind() != ErrorKind::kTimeout || waited_s < timeout_s) throw;
    std::string text = "rank " + std::to_string(world_->rank()) + " waited " +
                       std::to_string(waited_s) + " s " + work.purpose() +
                       ", its tag and its group, or raise timeout=";
    if (work.receives()) {
      world_->underLock([&] {
        text += ". Messages that came and no receive wanted: " + state_->describeUnexpected();
      });
    }
    throw Error(ErrorKind::kTimeout, text,
                {.rank = world_->rank(),
                 .peer = work.peer(),
                 .op = work.receives() ? "recv" : "send",
                 .ranks = error.context().ranks,
                 .seq = error.context().seq});
  }
}

}  // namespace hdpcomm
