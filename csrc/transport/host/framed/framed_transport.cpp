#include "transport/host/framed/framed_transport.hpp"

#include <algorithm>
#include <utility>

#include "base/settings.hpp"

namespace hdpcomm {
namespace framed {
namespace {

bool needsConfirmation(const SendRequest& request) {
  return request.confirm || request.bytes > kEagerBytes;
}

class FetchOverLink final : public RemoteFetch {
 public:
  FetchOverLink(std::shared_ptr<FrameLink> link, int rank, const FetchRequest& request)
      : link_(std::move(link)), rank_(rank), fetch_(link_->startFetch(rank, request)) {}
  ~FetchOverLink() override { link_->dropFetch(rank_, *fetch_); }
  std::optional<FetchResult> wait(Clock::time_point until) override {
    return link_->waitFetch(rank_, *fetch_, until);
  }

 private:
  std::shared_ptr<FrameLink> link_;
  int rank_;
  std::shared_ptr<FrameLink::Fetch> fetch_;
};

}  // namespace

FramedTransport::FramedTransport(std::shared_ptr<FrameLink> link)
    : link_(std::move(link)), silence_s_(Settings::get().silence_s) {
  peers_.resize(static_cast<size_t>(link_->size()));
  for (int i = 0; i < link_->size(); ++i) {
    at(i).rank = i;
    at(i).failures.connect(rank(), i);
  }
}

FramedTransport::~FramedTransport() { close("the communicator was destroyed"); }

void FramedTransport::activate(Peer& peer) {
  if (peer.in_active_list) return;
  peer.in_active_list = true;
  active_.push_back(peer.rank);
}

void FramedTransport::sendControl(Peer& peer, Header header, const std::string& text) {
  header.consumed = peer.announced_units = peer.consumed_units;
  const std::string plain = plainText(text, kTextBytes);
  header.piece = static_cast<uint32_t>(plain.size());
  link_->post(peer.rank, makeFrame(header, plain.data()));
}

void FramedTransport::postSend(const SendRequest& request) {
  Peer& peer = at(request.peer);
  if (peer.failures.refuses(request)) return;
  ++request.completion->pending;
  Outgoing out;
  out.request = request;
  peer.queue.push(std::move(out));
  activate(peer);
  push(peer);
}

void FramedTransport::postRecv(const RecvRequest& request) {
  Peer& peer = at(request.peer);
  if (peer.failures.refuses(request)) return;
  ++request.completion->pending;
  peer.recvs.push(request);
  activate(peer);
}

void FramedTransport::push(Peer& peer) {
  while (!peer.queue.empty() && pushPiece(peer, peer.queue.front())) {
    Outgoing& out = peer.queue.front();
    if (out.offset < out.request.bytes) continue;
    ++stats_.messages_sent;
    stats_.bytes_sent += out.request.bytes;
    peer.used = true;
    if (needsConfirmation(out.request)) {
      peer.inflight.push(std::move(out));
    } else {
      --out.request.completion->pending;
    }
    peer.queue.pop();
  }
}

// Passes one frame of the message to the link. Returns false if there is no room now.
bool FramedTransport::pushPiece(Peer& peer, Outgoing& out) {
  if (!link_->hasRoom(peer.rank)) return false;
  const SendRequest& request = out.request;
  const size_t piece = std::min(kFrameBulkBytes, request.bytes - out.offset);
  const uint64_t units = piece + kPieceUnits;
  if (peer.sent_units + units - peer.credited_units > kWindow) return false;
  if (!std::exchange(out.started, true)) out.index = peer.next_index++;
  Header header;
  header.consumed = peer.consumed_units;  // not announced: a credit may overtake this frame
  header.index = out.index;
  header.bytes = request.bytes;
  header.offset = out.offset;
  header.piece = static_cast<uint32_t>(piece);
  header.flags = needsConfirmation(request) ? kConfirm : 0;
  header.number = request.number;
  header.call = request.call;
  link_->post(peer.rank,
              makeFrame(header, static_cast<const std::byte*>(request.data) + out.offset));
  peer.sent_units += units;
  out.offset += piece;
  return true;
}

// Always returns true: a call is expensive anyway, so it does not track whether anything moved.
bool FramedTransport::progress() {
  do {
    arrivals_.clear();
    link_->collect(arrivals_);
    // All are routed first: a notice may withdraw messages that arrived just before it.
    for (FrameLink::Arrival& arrival : arrivals_) route(at(arrival.peer), std::move(arrival.frame));
    for (const FrameLink::Arrival& arrival : arrivals_) drain(at(arrival.peer));
    for (size_t i = 0; i < active_.size();) {
      Peer& peer = at(active_[i]);
      drain(peer);
      push(peer);
      if (peer.active()) {
        ++i;
      } else {
        peer.in_active_list = false;
        active_[i] = active_.back();
        active_.pop_back();
      }
    }
  } while (!arrivals_.empty());  // push() makes frames to this rank itself arrive
  return true;
}

void FramedTransport::cancel(const Completion* completion) {
  for (const int rank : active_) {
    Peer& peer = at(rank);
    const auto keep = [&](const Outgoing& out) { return out.request.completion != completion; };
    peer.queue.filter(keep);
    peer.inflight.filter(keep);
    peer.resync.cancel(completion);
    peer.recvs.filter([&](const RecvRequest& request) { return request.completion != completion; });
  }
}

std::vector<int> FramedTransport::awaited(const Completion* completion) {
  std::vector<int> ranks;
  for (const int rank : active_) {
    if (holdsRequestOf(at(rank), completion)) ranks.push_back(rank);
  }
  return ranks;
}

// Notices and markers overtake the messages that wait for room: all of them have failed.
void FramedTransport::notifyFailure(int peer_rank, const Error& error,
                                    std::optional<uint32_t> first_send,
                                    std::optional<uint32_t> send_number,
                                    std::optional<uint32_t> recv_number) {
  Peer& peer = at(peer_rank);
  const auto notice = peer.failures.giveUp(error, {send_number, recv_number}, first_send,
                                           peer.recvs, peer.inflight, peer.queue);
  if (!notice || peer_rank == rank()) return;
  Header header;
  header.kind = Kind::kFailure;
  header.detail = static_cast<uint8_t>(notice->kind);
  header.cause = notice->cause;
  header.flags = notice->flags();
  header.number = notice->ends.sends.value_or(0);
  header.other = notice->ends.recvs.value_or(0);
  header.index = first_send ? uint64_t{*first_send} + 1 : 0;
  sendControl(peer, header, notice->text);
}

void FramedTransport::postResync(int peer_rank, Completion* completion) {
  Peer& peer = at(peer_rank);
  activate(peer);
  sendMarker(peer, peer.resync.begin(completion));
}

void FramedTransport::sendMarker(Peer& peer, const Marker& marker) {
  Header header;
  header.kind = Kind::kMarker;
  header.number = marker.attempt;
  header.other = marker.peer_attempt;
  sendControl(peer, header);
}

std::optional<Error> FramedTransport::goneError(const Peer& peer, bool awaited) {
  const std::string waited =
      awaited ? " while rank " + std::to_string(rank()) + " waited for it" : std::string();
  std::string what;
  if (peer.gone) {
    what = " closed its communicator" + waited +
           (peer.farewell.empty() ? "" : "; its last words: " + peer.farewell);
  } else if (const std::string loss = link_->lossOf(peer.rank); !loss.empty()) {
    const size_t colon = loss.find(':');
    what = " " + loss.substr(0, colon) + waited + loss.substr(colon);
  } else if (const double silent = link_->silence(peer.rank); silent > silence_s_) {
    what = " gave no sign of life for " + std::to_string(silent) + " s" + waited +
           ": its host is cut off or its process is stopped (HDPCOMM_SILENCE_S)";
  } else {
    return std::nullopt;
  }
  return Error(ErrorKind::kPeerLost, "rank " + std::to_string(peer.rank) + what,
               {.rank = rank(), .peer = peer.rank, .op = {}, .ranks = {}, .seq = -1});
}

std::optional<Error> FramedTransport::departure(int peer) {
  return peer == rank() ? std::nullopt : goneError(at(peer), false);
}

void FramedTransport::checkPeers() {
  for (const int rank : active_) {
    Peer& peer = at(rank);
    const auto gone = goneError(peer);
    if (!gone) continue;
    drain(peer);  // messages that the peer sent before it left are still valid
    peer.resync.fail(*gone);
    peer.failures.failAll(*gone, peer.recvs, peer.inflight, peer.queue);
  }
}

std::optional<Error> FramedTransport::lost(int peer_rank, std::optional<uint32_t> send_number,
                                           std::optional<uint32_t> recv_number, bool needed) {
  Peer& peer = at(peer_rank);
  const auto gone = needed ? goneError(peer) : std::nullopt;
  drain(peer);
  return peer.failures.lost(send_number, recv_number, needed, gone,
                            [&] { return noticeAhead(peer, send_number, recv_number); });
}

std::function<void()> FramedTransport::waker() {
  return [link = link_] { link->wake(); };
}

std::shared_ptr<CounterWords> FramedTransport::counterWords(int rank) {
  return rank == link_->rank() ? link_->counterWords() : nullptr;
}

std::unique_ptr<RemoteFetch> FramedTransport::startFetch(int rank, const FetchRequest& request) {
  return std::make_unique<FetchOverLink>(link_, rank, request);
}

uint64_t FramedTransport::moves() const {
  uint64_t sum = 0;
  for (const Peer& peer : peers_)
    sum += peer.sent_units + peer.credited_units + peer.consumed_units;
  return sum;
}

Stats FramedTransport::stats() const {
  MessageCounts counts = stats_;
  counts.remote_bytes_sent = counts.bytes_sent;
  counts.remote_bytes_received = counts.bytes_received;
  const auto used = [](const Peer& peer) { return peer.used; };
  return counts.named(static_cast<size_t>(std::count_if(peers_.begin(), peers_.end(), used)));
}

void FramedTransport::close(const std::string& reason) noexcept {
  if (std::exchange(closed_, true)) return;
  try {
    Header header;
    header.kind = Kind::kGoodbye;
    for (Peer& peer : peers_) {
      if (peer.rank == rank()) continue;
      push(peer);
      sendControl(peer, header, reason);
    }
    link_->close();
  } catch (const std::exception&) {
    link_->close();  // out of memory: the peers see the connection end
  }
}

}  // namespace framed

std::unique_ptr<Transport> makeFramedTransport(std::shared_ptr<FrameLink> link) {
  return std::make_unique<framed::FramedTransport>(std::move(link));
}

}  // namespace hdpcomm
