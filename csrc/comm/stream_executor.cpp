// Runs a Schedule on streams. The schedule's own order is one stream's order; the transfers of a
// step leave it for the lanes of their pairs and come back before the next step.
#include "hdpcomm/comm/stream_engine.hpp"
#include "hdpcomm/kernels/reduce.hpp"

namespace hdpcomm {
namespace {

std::byte* at(const StreamEngine::Buffers& buffers, const Span& span) {
  return buffers[static_cast<size_t>(span.buffer)] + span.offset;
}

}  // namespace

void StreamEngine::runMoves(const Step& step, const Call& call, const Buffers& buffers,
                            Stream stream) {
  for (const Move& move : step.moves) {
    std::byte* to = at(buffers, move.to);
    const std::byte* from = at(buffers, move.from);
    if (move.to.bytes == 0) continue;
    const auto count = static_cast<int64_t>(move.to.bytes / dtypeBytes(call.dtype));
    switch (move.kind) {
      case MoveKind::kCopy:
        if (to != from) device_->copy(to, from, move.to.bytes, stream);
        break;
      case MoveKind::kReduce:
        device::launchReduce(*device_, {to, to, from, count, call.dtype, call.redop}, stream);
        break;
      case MoveKind::kScale:
        device::launchScale(*device_, {to, count, static_cast<double>(call.group_size), call.dtype},
                            stream);
        break;
    }
  }
}

void StreamEngine::runSchedule(const Schedule& schedule, const StreamWork& work,
                               const Buffers& buffers, Stream stream) {
  const std::vector<int>& ranks = *work.ranks_;
  const auto peerOf = [&](int group_rank) -> device::Link& {
    return link(ranks[static_cast<size_t>(group_rank)]);
  };
  std::vector<device::Fork> deferred;
  for (const Step& step : schedule.steps) {
    runMoves(step, work.call_, buffers, stream);
    if (step.sends.empty() && step.recvs.empty()) continue;
    device_->record(step_event_.get(), stream);
    device::Fork fork(*device_, step_event_.get());
    device::Fork late(*device_, step_event_.get());
    for (const Recv& recv : step.recvs) {
      peerOf(recv.peer).receive({.data = at(buffers, recv.to),
                                 .bytes = recv.to.bytes,
                                 .operand = recv.reduce ? at(buffers, recv.operand) : nullptr,
                                 .dtype = work.call_.dtype,
                                 .redop = work.call_.redop},
                                fork);
      ++stats_.messages_received;
      stats_.bytes_received += recv.to.bytes;
    }
    for (const Send& send : step.sends) {
      peerOf(send.peer).send(at(buffers, send.from), send.from.bytes, send.deferred ? late : fork);
      ++stats_.messages_sent;
      stats_.bytes_sent += send.from.bytes;
    }
    fork.join(stream);
    if (!late.lanes().empty()) deferred.push_back(std::move(late));
  }
  for (device::Fork& late : deferred) late.join(stream);
}

}  // namespace hdpcomm
