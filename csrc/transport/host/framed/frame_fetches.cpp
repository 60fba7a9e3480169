// Counters between hosts: requests and answers go past the messages, and are served by the
// carrier's threads.
#include <algorithm>

#include "transport/host/framed/frame.hpp"

namespace hdpcomm {

using framed::Header;
using framed::Kind;

void FrameLink::serveCounters(std::shared_ptr<CounterWords> words) {
  std::lock_guard lock(mutex_);
  words_ = std::move(words);
}

std::shared_ptr<CounterWords> FrameLink::counterWords() const {
  std::lock_guard lock(mutex_);
  return words_;
}

std::shared_ptr<FrameLink::Fetch> FrameLink::startFetch(int peer_rank,
                                                        const FetchRequest& request) {
  auto fetch = std::make_shared<Fetch>();
  fetch->request = request;
  std::unique_lock lock(mutex_);
  Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  peer.fetches.push_back(fetch);
  wakeCarrier(peer);
  return fetch;
}

std::optional<FetchResult> FrameLink::waitFetch(int peer_rank, const Fetch& fetch,
                                                Clock::time_point until) {
  std::unique_lock lock(mutex_);
  const Peer& peer = peers_.at(static_cast<size_t>(peer_rank));
  for_fetches_.wait_until(
      lock, until, [&] { return fetch.result || closed_ || peer.ended || !peer.loss.empty(); });
  return fetch.result;
}

void FrameLink::dropFetch(int peer_rank, const Fetch& fetch) {
  std::lock_guard lock(mutex_);
  if (fetch.sent) return;  // its answer, if one comes, is taken and forgotten
  std::erase_if(peers_.at(static_cast<size_t>(peer_rank)).fetches,
                [&](const std::shared_ptr<Fetch>& each) { return each.get() == &fetch; });
}

bool FrameLink::answerDue(const Peer& peer) const {
  const bool said_goodbye = closed_ && peer.outbox.empty();
  return !peer.answers.empty() && !said_goodbye;
}

bool FrameLink::fetchDue(const Peer& peer) const {
  return !closed_ && peer.fetches_sent < std::min(peer.fetches.size(), framed::kFetches);
}

FramePtr FrameLink::makeFetch(Peer& peer) {
  Fetch& fetch = *peer.fetches[peer.fetches_sent];
  fetch.sent = true;
  Header header;
  header.kind = Kind::kFetch;
  header.index = peer.fetches_answered + peer.fetches_sent++;
  header.number = fetch.request.word;
  header.other = fetch.request.generation;
  header.bytes = fetch.request.amount;
  return framed::makeFrame(header, nullptr);
}

FramePtr FrameLink::makeAnswer(Peer& peer) {
  const FetchResult answer = peer.answers.front();
  Header header;
  header.kind = Kind::kFetched;
  header.index = peer.peers_fetches - peer.answers.size();
  header.detail = static_cast<uint8_t>(answer.end);
  header.number = answer.before;
  peer.answers.pop_front();
  return framed::makeFrame(header, nullptr);
}

std::string FrameLink::takeFetch(Peer& peer, const Frame& frame) {
  const Header header = framed::readHeader(frame);
  if (header.index != peer.peers_fetches) return "it asked for a counter out of order";
  if (peer.answers.size() >= framed::kFetches) return "it asks for counters and takes no answers";
  ++peer.peers_fetches;
  peer.last_moved = peer.last_heard;
  peer.answers.push_back(
      fetchAdd(words_->at[header.number],
               {header.number, header.other, static_cast<uint32_t>(header.bytes)}));
  return "";
}

std::string FrameLink::takeAnswer(Peer& peer, const Frame& frame) {
  const Header header = framed::readHeader(frame);
  if (peer.fetches_sent == 0 || header.index != peer.fetches_answered) {
    return "it answered for a counter that nobody asked for";
  }
  peer.fetches.front()->result = FetchResult{static_cast<FetchEnd>(header.detail), header.number};
  peer.fetches.pop_front();
  --peer.fetches_sent;
  ++peer.fetches_answered;
  for_fetches_.notify_all();
  return "";
}

}  // namespace hdpcomm
