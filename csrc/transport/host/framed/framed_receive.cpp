// The receiving half: matching, copies and reductions from frames, failure notices and markers of
// resync().
#include <algorithm>
#include <cstring>

#include "transport/host/framed/framed_transport.hpp"

namespace hdpcomm::framed {
namespace {

std::string textOf(Frame& frame, const Header& header) {
  return plainText({reinterpret_cast<const char*>(payload(frame)), header.piece});
}

}  // namespace

std::optional<std::string> FramedTransport::outOfPlace(Peer& peer, const Header& header) const {
  const auto wrong = [](const char* what, uint64_t value) {
    return std::string("it ") + what + " (" + std::to_string(value) + " units)";
  };
  if (header.consumed > peer.sent_units) {
    return wrong("consumed more than was sent to it", header.consumed);
  }
  if (header.kind == Kind::kFailure || header.kind == Kind::kMarker) {
    // They wait behind the pieces before them.
    if (peer.incoming.size() < 2 * kControlFrames) return std::nullopt;
    return wrong("sent more than may be under way", peer.incoming.size() * kPieceUnits);
  }
  if (header.kind != Kind::kData) return std::nullopt;
  if (auto broken = peer.arriving.add(header)) return broken;
  if (const uint64_t waiting = peer.arriving.units() - peer.consumed_units; waiting > kWindow) {
    return wrong("sent more than may be under way", waiting);
  }
  return std::nullopt;
}

void FramedTransport::route(Peer& peer, FramePtr frame) {
  const Header header = readHeader(*frame);
  if (peer.cut_off) return;
  if (const auto why = outOfPlace(peer, header)) {
    peer.cut_off = true;
    link_->cutOff(peer.rank, *why);
    return;
  }
  peer.credited_units = std::max(peer.credited_units, header.consumed);
  switch (header.kind) {
    case Kind::kFailure:
      if (header.index > 0) dropRevoked(peer, static_cast<uint32_t>(header.index - 1));
      [[fallthrough]];
    case Kind::kData:
    case Kind::kMarker:
      peer.used = true;
      peer.incoming.push(std::move(frame));
      return;
    case Kind::kAccepted:
      endAccepted(peer, header);
      return;
    case Kind::kRejected:
      endRejected(peer, header);
      return;
    case Kind::kGoodbye:
      peer.gone = true;
      peer.farewell = textOf(*frame, header);
      return;
    case Kind::kCredit:
    case Kind::kPing:
    case Kind::kPong:
    case Kind::kFetch:
    case Kind::kFetched:
    case Kind::kHeardGoodbye:
      return;
  }
}

void FramedTransport::endAccepted(Peer& peer, const Header& header) {
  peer.inflight.filter([&](const Outgoing& out) {
    if (out.index != header.index) return true;
    --out.request.completion->pending;
    return false;
  });
}

void FramedTransport::endRejected(Peer& peer, const Header& header) {
  // A receiver that is out of step sent a notice before it refused the message: receives the notice
  // first, which fails the request with the true reason, and may end others.
  drain(peer);
  const auto end = [&](const Outgoing& out) {
    if (!out.started || out.index != header.index) return true;
    Completion& completion = *out.request.completion;
    --completion.pending;
    if (!completion.failure) {
      completion.failure =
          (header.flags & kDropped) != 0
              ? droppedError(rank(), peer.rank, out.request.call)
              : mismatchError({rank(), out.request.call, out.request.bytes},
                              {peer.rank, header.call, static_cast<size_t>(header.bytes)}, true);
    }
    return false;
  };
  peer.inflight.filter(end);
  peer.queue.filter(end);
}

// Counts a piece as consumed, and returns credit to the sender from time to time.
void FramedTransport::consume(Peer& peer, const Header& header) {
  peer.consumed_units += header.piece + kPieceUnits;
  if (peer.consumed_units - peer.announced_units < kWindow / 4) return;
  Header credit;
  credit.kind = Kind::kCredit;
  sendControl(peer, credit);
}

// Discards a piece of a message that arrived while the pair was out of step, or that no operation
// received. Its sender may wait for an answer.
void FramedTransport::drop(Peer& peer, const Header& header) {
  consume(peer, header);
  if ((header.flags & kConfirm) == 0 || header.offset + header.piece < header.bytes) return;
  Header dropped;
  dropped.kind = Kind::kRejected;
  dropped.flags = kDropped;
  dropped.index = header.index;
  sendControl(peer, dropped);
}

// The peer has withdrawn its messages from this number on: a receive that is late must not take
// them for those of another operation.
void FramedTransport::dropRevoked(Peer& peer, uint32_t first_send) {
  peer.incoming.filter([&](const FramePtr& frame) {
    const Header header = readHeader(*frame);
    if (header.kind != Kind::kData || static_cast<int32_t>(header.number - first_send) < 0) {
      return true;
    }
    consume(peer, header);
    return false;
  });
}

void FramedTransport::receiveMarker(Peer& peer, const Header& header) {
  std::optional<Marker> answer;
  const bool expected = peer.resync.underWay();
  const bool in_step = peer.resync.receive({header.number, header.other}, &answer);
  if (answer) sendMarker(peer, *answer);
  if (in_step) {
    peer.failures.resynced();
  } else if (!expected) {
    peer.failures.peerRestarted(peer.recvs, peer.inflight, peer.queue);
  }
}

// Consumes pieces while there are receives for them, and the notices and markers among them.
void FramedTransport::drain(Peer& peer) {
  while (!peer.incoming.empty()) {
    const FramePtr frame = peer.incoming.front();
    const Header header = readHeader(*frame);
    if (header.kind == Kind::kFailure) {
      peer.incoming.pop();
      peer.failures.receive(noticeIn(peer, *frame), peer.recvs, peer.inflight, peer.queue);
    } else if (header.kind == Kind::kMarker) {
      peer.incoming.pop();
      receiveMarker(peer, header);
    } else if (deliver(peer, *frame, header)) {
      peer.incoming.pop();
    } else {
      return;
    }
  }
}

// Returns false if the piece cannot be consumed now.
bool FramedTransport::deliver(Peer& peer, Frame& frame, const Header& header) {
  if (peer.refused && header.index <= *peer.refused) {
    consume(peer, header);
    return true;
  }
  if (peer.recvs.empty()) {
    if (!peer.failures.outOfStep()) return false;
    drop(peer, header);
    return true;
  }
  RecvRequest& request = peer.recvs.front();
  const auto ahead = static_cast<int32_t>(header.number - request.number);
  if (ahead < 0) {
    drop(peer, header);
    return true;
  }
  if (request.completion->failure) return false;  // its owner is about to cancel it
  if (ahead > 0 || header.call != request.call || header.bytes != request.bytes) {
    reject(peer, header, request);
    return true;
  }
  request.store(header.offset, payload(frame), header.piece);
  consume(peer, header);
  if (header.offset + header.piece < header.bytes) return true;
  ++stats_.messages_received;
  stats_.bytes_received += header.bytes;
  if ((header.flags & kConfirm) != 0) {
    Header accepted;
    accepted.kind = Kind::kAccepted;
    accepted.index = header.index;
    sendControl(peer, accepted);
  }
  --request.completion->pending;
  peer.recvs.pop();
  return true;
}

// Sends the receiver's call back, so that the sender's error can name both.
void FramedTransport::reject(Peer& peer, const Header& header, const RecvRequest& request) {
  request.completion->failure =
      mismatchError({rank(), request.call, request.bytes},
                    {peer.rank, header.call, static_cast<size_t>(header.bytes)}, false);
  Header rejected;
  rejected.kind = Kind::kRejected;
  rejected.index = header.index;
  rejected.bytes = request.bytes;
  rejected.call = request.call;
  sendControl(peer, rejected);
  peer.refused = header.index;
  consume(peer, header);
}

void FramedTransport::rejectUnexpected(int peer_rank, uint32_t number, const Call& call,
                                       Completion* completion) {
  Peer& peer = at(peer_rank);
  if (!peer.recvs.empty() || completion->failure) return;
  drain(peer);
  if (peer.incoming.empty() || peer.failures.outOfStep()) return;
  const Header header = readHeader(*peer.incoming.front());
  if (header.kind != Kind::kData || !upTo(header.number, number)) return;
  RecvRequest request;
  request.call = call;
  request.completion = completion;
  reject(peer, header, request);
  peer.incoming.pop();
}

Notice FramedTransport::noticeIn(const Peer& peer, Frame& frame) const {
  const Header header = readHeader(frame);
  const GiveUp ours = endsHere(header.flags, header.number, header.other);
  return noticeFrom(peer.rank, rank(), static_cast<ErrorKind>(header.detail), textOf(frame, header),
                    header.cause, ours);
}

// The notice of this very operation among the frames that were not consumed yet.
std::optional<Notice> FramedTransport::noticeAhead(Peer& peer, std::optional<uint32_t> send_number,
                                                   std::optional<uint32_t> recv_number) const {
  for (size_t i = 0; i < peer.incoming.size(); ++i) {
    Frame& frame = *peer.incoming[i];
    if (readHeader(frame).kind != Kind::kFailure) continue;
    Notice notice = noticeIn(peer, frame);
    if (notice.concerns(send_number, recv_number)) return notice;
  }
  return std::nullopt;
}

}  // namespace hdpcomm::framed
