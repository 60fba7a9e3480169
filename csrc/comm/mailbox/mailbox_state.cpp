#include "comm/mailbox/mailbox_state.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hdpcomm {
namespace {

constexpr uint64_t kMaxElements = uint64_t{1} << 48;  // more than an address space holds

// Whether a failure of the payload means that there was no message after all: its sender gave it
// up, and the receive goes on waiting.
bool wasGivenUp(const Error& error) {
  return error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kAborted;
}

}  // namespace

Call MailboxState::callOf(uint64_t count, DType dtype) const {
  Call call = call_;
  call.count = count;
  call.dtype = dtype;
  return call;
}

void MailboxState::post(const std::shared_ptr<LabelledReceive>& receive) {
  receive->unmatch();
  for (auto it = unexpected_.begin(); it != unexpected_.end();) {
    if (it->local && it->local->failed()) {
      it = unexpected_.erase(it);
      continue;
    }
    if (!receive->wants(it->message.peer, it->label)) {
      ++it;
      continue;
    }
    const Unexpected kept = std::move(*it);
    unexpected_.erase(it);
    const bool taken = receive->take(kept.message.peer, kept.message);
    if (kept.local && taken) kept.local->end();
    if (kept.local && !taken) kept.local->end(*receive->payloadFailure());
    return;
  }
  if (const Error* error = lossOf(*receive)) {
    receive->end(*error);
    return;
  }
  posted_.push_back(receive);
  for (const int source : receive->sources()) activate(source);
}

void MailboxState::sendToSelf(const std::shared_ptr<LabelledSend>& send) {
  const auto receive = match(rank_, send->label());
  if (!receive) {
    unexpected_.push_back({send->message(), send->label(), nullptr, send});
  } else if (receive->take(rank_, send->message())) {
    send->end();
  } else {
    send->end(*receive->payloadFailure());
  }
}

std::string MailboxState::describeUnexpected() const {
  constexpr size_t kMost = 8;
  std::string text;
  size_t count = 0;
  for (const Unexpected& kept : unexpected_) {
    if (kept.local && kept.local->failed()) continue;
    if (++count > kMost) return text + ", ...";
    text += (count > 1 ? ", (rank " : "(rank ") + std::to_string(kept.message.peer) + ", tag " +
            std::to_string(kept.label.tag) + ")";
  }
  return count == 0 ? "none" : text;
}

bool MailboxState::advance(Transport& transport) {
  bool posted = false;
  for (size_t i = 0; i < active_.size();) {
    const int peer = active_[i];
    posted |= advance(peer, transport);
    if (channels_[static_cast<size_t>(peer)].stage != Stage::kIdle) {
      ++i;
      continue;
    }
    channels_[static_cast<size_t>(peer)].active = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
  return posted;
}

// Takes a channel as far as it goes now; true when requests were posted.
bool MailboxState::advance(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  bool posted = false;
  for (;;) {
    switch (channel.stage) {
      case Stage::kIdle:
        if (channel.lost || !wanted(peer)) return posted;
        receiveHeader(peer, transport);
        posted = true;
        break;
      case Stage::kHeader:
        if (!takeHeader(peer, transport)) return posted;
        posted |= channel.stage == Stage::kPayload;
        break;
      case Stage::kPayload:
        if (!(channel.receive ? takePayload(peer, transport) : takeUnexpected(peer, transport))) {
          return posted;
        }
        break;
    }
  }
}

void MailboxState::receiveHeader(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  channel.stage = Stage::kHeader;
  channel.completion = {};
  RecvRequest request;
  request.peer = peer;
  request.data = &channel.header;
  request.bytes = sizeof channel.header;
  request.number = transport.nextRecvNumber(peer);
  request.call = callOf(sizeof channel.header, DType::kUint8);
  request.completion = &channel.completion;
  transport.postRecv(request);
}

bool MailboxState::takeHeader(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  if (channel.completion.failure) {
    const Error error = *channel.completion.failure;
    transport.cancel(&channel.completion);
    channel.stage = Stage::kIdle;
    // The rank is gone, or the pair is out of step. All that was sent before has been received: the
    // notice came behind it.
    (void)transport.lost(peer, std::nullopt, std::nullopt, false);  // receives that notice now
    markLost(peer, error.kind() == ErrorKind::kPeerLost
                       ? error
                       : transport.outOfStep(peer).value_or(error));
    return true;
  }
  if (channel.completion.pending > 0) return false;
  const MailHeader& header = channel.header;
  if (header.dtype >= kNumDTypes || header.count > kMaxElements) {
    channel.stage = Stage::kIdle;
    markLost(peer, Error(ErrorKind::kPeerLost,
                         "rank " + std::to_string(peer) + " was cut off: its message has " +
                             std::to_string(header.count) + " elements of type " +
                             std::to_string(header.dtype) + ", which no rank sends",
                         {.rank = rank_, .peer = peer, .op = {}, .ranks = {}, .seq = -1}));
    return true;
  }
  receivePayload(peer, transport);
  return true;
}

void MailboxState::receivePayload(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  const MailHeader& header = channel.header;
  channel.stage = Stage::kPayload;
  const uint32_t number = transport.nextRecvNumber(peer);
  channel.receive = match(peer, header.label);
  if (channel.receive) {
    // The transport compares size and type with the payload's, and fails both sides where they
    // differ.
    transport.postRecv(channel.receive->match(peer, number));
    return;
  }
  const auto dtype = static_cast<DType>(header.dtype);
  const size_t bytes = header.count * dtypeBytes(dtype);
  channel.kept = std::make_unique_for_overwrite<std::byte[]>(bytes);
  channel.completion = {};
  RecvRequest request;
  request.peer = peer;
  request.data = channel.kept.get();
  request.bytes = bytes;
  request.number = number;
  request.call = callOf(header.count, dtype);
  request.completion = &channel.completion;
  transport.postRecv(request);
}

bool MailboxState::takePayload(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  LabelledReceive& receive = *channel.receive;
  if (!receive.hasFailed() && receive.payloadFailure() && wasGivenUp(*receive.payloadFailure())) {
    receive.withdraw(transport);
    receive.unmatch();
    // It was the first of those that want such a message.
    posted_.push_front(channel.receive);
    for (const int source : receive.sources()) activate(source);
  } else if (!receive.hasFailed() && !receive.payloadFailure() && !receive.idle()) {
    return false;
  }
  channel.receive = nullptr;
  channel.stage = Stage::kIdle;
  return true;
}

bool MailboxState::takeUnexpected(int peer, Transport& transport) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  if (!channel.completion.failure && channel.completion.pending > 0) return false;
  channel.stage = Stage::kIdle;
  auto payload = std::move(channel.kept);
  if (channel.completion.failure) {  // no message; a rank that is gone shows at the next header
    transport.cancel(&channel.completion);
    return true;
  }
  const MailHeader& header = channel.header;
  const Message message{payload.get(), header.count, static_cast<DType>(header.dtype), peer};
  if (const auto late = match(peer, header.label)) {  // posted meanwhile
    late->take(peer, message);
  } else {
    unexpected_.push_back({message, header.label, std::move(payload), nullptr});
  }
  return true;
}

bool MailboxState::wanted(int peer) const {
  return std::any_of(posted_.begin(), posted_.end(), [&](const auto& receive) {
    return receive->from(peer) && !receive->failed();
  });
}

std::shared_ptr<LabelledReceive> MailboxState::match(int source, const Label& label) {
  for (auto it = posted_.begin(); it != posted_.end();) {
    if ((*it)->failed()) {
      it = posted_.erase(it);
    } else if ((*it)->wants(source, label)) {
      auto found = std::move(*it);
      posted_.erase(it);
      return found;
    } else {
      ++it;
    }
  }
  return nullptr;
}

void MailboxState::activate(int peer) {
  Channel& channel = channels_[static_cast<size_t>(peer)];
  if (peer == rank_ || channel.active || channel.lost) return;
  channel.active = true;
  active_.push_back(peer);
}

void MailboxState::markLost(int peer, const Error& error) {
  channels_[static_cast<size_t>(peer)].lost = error;
  std::erase_if(posted_, [&](const auto& receive) {
    const Error* why = receive->failed() ? nullptr : lossOf(*receive);
    if (why != nullptr) receive->end(*why);
    return receive->failed();
  });
}

const Error* MailboxState::lossOf(const LabelledReceive& receive) const {
  const auto lost = [this](int source) {
    return channels_[static_cast<size_t>(source)].lost.has_value();
  };
  const std::vector<int>& sources = receive.sources();
  if (!std::all_of(sources.begin(), sources.end(), lost)) return nullptr;
  return &*channels_[static_cast<size_t>(sources[0])].lost;
}

}  // namespace hdpcomm
