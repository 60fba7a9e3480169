#include "comm/host/work.hpp"

#include <algorithm>
#include <cstring>

#include "transport/failures.hpp"

namespace hdpcomm {
namespace {

// Moves on host memory.
struct HostMath {
  ReduceFn reduce_function;
  const Call& call;

  void copy(std::byte* to, const std::byte* from, size_t bytes) const {
    std::memmove(to, from, bytes);
  }
  void reduce(std::byte* to, const std::byte* from, size_t count) const {
    reduce_function(to, to, from, count);
  }
  void average(std::byte* to, size_t count) const {
    divideFunction(call.dtype)(to, count, call.group_size);
  }
};

}  // namespace

CollectiveWork::CollectiveWork(Call call, Ranks ranks, std::shared_ptr<const Schedule> schedule,
                               const void* in, void* out)
    : Work(call, std::move(ranks)),
      schedule_(std::move(schedule)),
      element_bytes_(dtypeBytes(call.dtype)) {
  if (schedule_->temp_bytes > 0) {
    temp_ = std::make_unique_for_overwrite<std::byte[]>(schedule_->temp_bytes);
  }
  buffers_[static_cast<int>(Buffer::kIn)] = static_cast<std::byte*>(const_cast<void*>(in));
  buffers_[static_cast<int>(Buffer::kOut)] = static_cast<std::byte*>(out);
  buffers_[static_cast<int>(Buffer::kTemp)] = temp_.get();
  if (call.redop != RedOp::kNone) reduce_ = reduceFunction(call.dtype, call.redop);
}

void CollectiveWork::takeNumbers(Transport& transport) {
  numbers_.reserve(ranks_->size());
  for (const int peer : *ranks_) {
    numbers_.push_back({peer, transport.nextSendNumber(peer), transport.nextRecvNumber(peer)});
  }
}

bool CollectiveWork::advance(Transport& transport) {
  const HostMath math{reduce_, call_};
  bool posted = false;
  while (completion_.pending == 0 && next_step_ < schedule_->steps.size()) {
    const Step& step = schedule_->steps[next_step_++];
    for (const Move& move : step.moves) doMove(move, buffers_, element_bytes_, math);
    post(step, transport);
    posted = true;
  }
  return posted;
}

bool CollectiveWork::willNeed(int peer) const {
  const auto with = [&](const auto& transfer) {
    return (*ranks_)[static_cast<size_t>(transfer.peer)] == peer;
  };
  return std::any_of(schedule_->steps.begin() + static_cast<ptrdiff_t>(next_step_),
                     schedule_->steps.end(), [&](const Step& step) {
                       return std::any_of(step.sends.begin(), step.sends.end(), with) ||
                              std::any_of(step.recvs.begin(), step.recvs.end(), with);
                     });
}

void CollectiveWork::post(const Step& step, Transport& transport) {
  // Receives first: a message of the own process can then be taken as soon as it is sent.
  for (const Recv& recv : step.recvs) {
    RecvRequest request;
    request.peer = (*ranks_)[static_cast<size_t>(recv.peer)];
    request.data = addressOf(buffers_, recv.to);
    request.bytes = recv.to.bytes;
    if (recv.reduce) {
      request.reduce = reduce_;
      request.operand = addressOf(buffers_, recv.operand);
      request.element_bytes = element_bytes_;
    }
    request.number = *numbers_[static_cast<size_t>(recv.peer)].recv;
    request.call = call_;
    request.completion = &completion_;
    transport.postRecv(request);
  }
  for (const Send& send : step.sends) {
    SendRequest request;
    request.peer = (*ranks_)[static_cast<size_t>(send.peer)];
    request.data = addressOf(buffers_, send.from);
    request.bytes = send.from.bytes;
    request.number = *numbers_[static_cast<size_t>(send.peer)].send;
    request.confirm = send.confirm;
    request.call = call_;
    request.completion = send.deferred ? &deferred_ : &completion_;
    transport.postSend(request);
  }
}

void MessageWork::takeNumbers(Transport& transport) {
  Numbers& numbers = numbers_.push_back({peer_, {}, {}});
  if (sends_) {
    number_ = transport.nextSendNumber(peer_);
    numbers.send = number_;
  } else {
    number_ = transport.nextRecvNumber(peer_);
    numbers.recv = number_;
  }
}

bool MessageWork::advance(Transport& transport) {
  if (posted_) return false;
  posted_ = true;
  if (sends_) {
    transport.postSend({.peer = peer_,
                        .data = data_,
                        .bytes = bytes_,
                        .number = number_,
                        .confirm = true,
                        .call = call_,
                        .completion = &completion_});
  } else {
    transport.postRecv({.peer = peer_,
                        .data = data_,
                        .bytes = bytes_,
                        .number = number_,
                        .call = call_,
                        .completion = &completion_});
  }
  return true;
}

void ResyncWork::takeNumbers(Transport& transport) {
  for (const int peer : *ranks_) {
    transport.restartNumbers(peer);
    numbers_.push_back({peer, {}, {}});
  }
}

bool ResyncWork::advance(Transport& transport) {
  if (!posted_) {
    posted_ = true;
    for (const int peer : *ranks_) transport.postResync(peer, &completion_);
    return true;
  }
  if (completion_.pending > 0 || completion_.failure) return false;
  // A peer that was in step with this rank may have failed with another one since. That it, or
  // another thread of this rank, has called the next resync() is no failure of this one.
  bool again = false;
  for (const int peer : *ranks_) {
    const auto error = transport.outOfStep(peer);
    if (!error) continue;
    if (keeps_on_ && !calledResyncItself(*error)) {
      transport.restartNumbers(peer);
      transport.postResync(peer, &completion_);
      again = true;
    } else if (!hidesCause(*error)) {
      completion_.failure = error;
    }
  }
  return again;
}

ExchangeWork::ExchangeWork(const Call& call, Ranks ranks, std::span<const Message> sends,
                           std::span<const Message> recvs)
    : Work(call, std::move(ranks)) {
  sends_.reserve(sends.size());
  recvs_.reserve(recvs.size());
  numbers_.reserve(std::min(sends.size() + recvs.size(), ranks_->size()));
  for (const Message& message : sends) add(sends_, message).confirm = true;
  for (const Message& message : recvs) add(recvs_, message);
}

template <typename Request>
Request& ExchangeWork::add(InlineVector<Request, 2>& requests, const Message& message) {
  Request& request = requests.emplace_back();
  request.peer = (*ranks_)[static_cast<size_t>(message.peer)];
  request.data = message.data;
  request.bytes = message.count * dtypeBytes(message.dtype);
  request.call = call_;
  request.call.count = message.count;
  request.call.dtype = message.dtype;
  request.completion = &completion_;
  return request;
}

ExchangeWork::Numbers& ExchangeWork::numbersOf(int peer) {
  for (Numbers& numbers : numbers_) {
    if (numbers.peer == peer) return numbers;
  }
  return numbers_.push_back({peer, {}, {}});
}

void ExchangeWork::takeNumbers(Transport& transport) {
  for (SendRequest& send : sends_) {
    send.number = transport.nextSendNumber(send.peer);
    numbersOf(send.peer).send = send.number;
  }
  for (RecvRequest& recv : recvs_) {
    recv.number = transport.nextRecvNumber(recv.peer);
    numbersOf(recv.peer).recv = recv.number;
  }
}

std::optional<uint32_t> ExchangeWork::firstSend(const Numbers& numbers) const {
  for (const SendRequest& send : sends_) {
    if (send.peer == numbers.peer) return send.number;
  }
  return std::nullopt;
}

void ExchangeWork::enter(FlightRecorder& recorder) {
  for (const SendRequest& send : sends_) {
    recorder.addMessage(flight_, send.call, seq_, send.peer, true, send.number);
  }
  for (const RecvRequest& recv : recvs_) {
    recorder.addMessage(flight_, recv.call, seq_, recv.peer, false, recv.number);
  }
}

bool ExchangeWork::advance(Transport& transport) {
  if (posted_) return false;
  posted_ = true;
  // Receives first, as in a step of a collective.
  for (const RecvRequest& recv : recvs_) transport.postRecv(recv);
  for (const SendRequest& send : sends_) transport.postSend(send);
  return true;
}

}  // namespace hdpcomm
