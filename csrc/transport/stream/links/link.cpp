#include "transport/stream/links/link.hpp"

#include <algorithm>

#include "transport/stream/launch.hpp"

namespace hdpcomm::device {
namespace {

// Smaller shares are not worth a second copy: at some 400 GB/s a MiB takes 2.6 us, about as long as
// one enqueued operation takes to begin.
constexpr size_t kShareBytes = 1 << 20;

// Up to this, a piece and its flag go by one small kernel: a launch costs less than a copy and a
// write, and the copy engines' start-up time is saved.
constexpr size_t kFusedBytes = 8192;

}  // namespace

Stream Fork::enter(Lane& lane) {
  if (std::find(lanes_.begin(), lanes_.end(), &lane) == lanes_.end()) {
    device_->wait(lane.stream(), begin_);
    lanes_.push_back(&lane);
  }
  return lane.stream();
}

void Fork::join(Stream stream) {
  for (const Lane* lane : lanes_) {
    device_->record(lane->event(), lane->stream());
    device_->wait(stream, lane->event());
  }
}

Link::Link(DevicePtr device, const Arena& arena, int rank, int peer)
    : device_(std::move(device)),
      arena_(arena),
      rank_(rank),
      peer_(peer),
      mine_(arena.flags(rank, peer)),
      theirs_(arena.flags(peer, rank)) {}

Lane& Link::lane(std::vector<Lane>& lanes, int index) {
  // Made on first use, all together: a Fork holds their addresses.
  if (lanes.empty()) {
    const auto count = static_cast<size_t>(arena_.config().num_lanes);
    lanes.reserve(count);
    while (lanes.size() < count) lanes.emplace_back(device_);
  }
  return lanes[static_cast<size_t>(index)];
}

// An empty message is one empty piece: the receiver waits for it all the same.
std::vector<Link::Piece> Link::pieces(size_t bytes) const {
  std::vector<Piece> result;
  const size_t most = arena_.config().slot_bytes;
  for (size_t offset = 0; offset < bytes || result.empty(); offset += most) {
    result.push_back({offset, std::min(most, bytes - offset)});
  }
  return result;
}

// The pieces of a message with a landing place: one a lane, or one in all.
std::vector<Link::Piece> Link::shares(size_t bytes) const {
  const auto lanes = static_cast<size_t>(arena_.config().num_lanes);
  const size_t count = std::clamp<size_t>(bytes / kShareBytes, 1, lanes);
  const size_t share = (bytes / count + 511) / 512 * 512;
  std::vector<Piece> result;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = std::min(bytes, i * share);
    result.push_back({begin, i + 1 == count ? bytes - begin : std::min(share, bytes - begin)});
  }
  return result;
}

void Link::send(const std::byte* data, size_t bytes, Fork& fork) {
  const ArenaConfig& config = arena_.config();
  for (const Piece& piece : pieces(bytes)) {
    const int slot = next_out_slot_;
    next_out_slot_ = (slot + 1) % config.num_slots;
    const Stream stream = fork.enter(lane(out_, slot % config.num_lanes));
    sendPiece(data + piece.offset, piece.bytes, slot, stream);
  }
}

void Link::sendPiece(const std::byte* data, size_t bytes, int slot, Stream stream) {
  device_->waitValue(stream, &mine_.credit[slot], 1);
  device_->writeValue(stream, &mine_.credit[slot], 0);
  std::byte* to = arena_.slot(peer_, rank_, slot);
  if (bytes > 0 && bytes <= kFusedBytes) {
    launchPut(*device_, {to, data, static_cast<int64_t>(bytes), &theirs_.full[slot], 1}, stream);
    return;
  }
  device_->copy(to, data, bytes, stream);
  device_->writeValue(stream, &theirs_.full[slot], 1);
}

void Link::receive(const Incoming& message, Fork& fork) {
  const ArenaConfig& config = arena_.config();
  for (const Piece& piece : pieces(message.bytes)) {
    const int slot = next_in_slot_;
    next_in_slot_ = (slot + 1) % config.num_slots;
    const Stream stream = fork.enter(lane(in_, slot % config.num_lanes));
    receivePiece(message, piece, slot, stream);
  }
}

void Link::receivePiece(const Incoming& message, const Piece& piece, int slot, Stream stream) {
  device_->waitValue(stream, &mine_.full[slot], 1);
  device_->writeValue(stream, &mine_.full[slot], 0);
  const std::byte* from = arena_.slot(rank_, peer_, slot);
  std::byte* to = message.data + piece.offset;
  if (message.operand == nullptr && piece.bytes > 0 && piece.bytes <= kFusedBytes) {
    launchPut(*device_, {to, from, static_cast<int64_t>(piece.bytes), &theirs_.credit[slot], 1},
              stream);
    return;
  }
  if (message.operand == nullptr) {
    device_->copy(to, from, piece.bytes, stream);
  } else if (piece.bytes > 0) {
    const auto count = static_cast<int64_t>(piece.bytes / dtypeBytes(message.dtype));
    launchReduce(*device_,
                 {to, message.operand + piece.offset, from, count, message.dtype, message.redop},
                 stream);
  }
  device_->writeValue(stream, &theirs_.credit[slot], 1);
}

void Link::put(const std::byte* data, size_t bytes, size_t offset, Fork& fork) {
  const std::vector<Piece> parts = shares(bytes);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Stream stream = fork.enter(lane(out_, static_cast<int>(i)));
    device_->waitValue(stream, &mine_.clear[i], 1);
    device_->writeValue(stream, &mine_.clear[i], 0);
    device_->copy(arena_.landing(peer_) + offset + parts[i].offset, data + parts[i].offset,
                  parts[i].bytes, stream);
    device_->writeValue(stream, &theirs_.landed[i], 1);
  }
}

void Link::land(size_t bytes, Fork& fork) {
  const std::vector<Piece> parts = shares(bytes);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Stream stream = fork.enter(lane(in_, static_cast<int>(i)));
    device_->writeValue(stream, &theirs_.clear[i], 1);
    device_->waitValue(stream, &mine_.landed[i], 1);
    device_->writeValue(stream, &mine_.landed[i], 0);
  }
}

void Link::addStreams(std::vector<Stream>& streams) const {
  for (const auto* lanes : {&out_, &in_}) {
    for (const Lane& lane : *lanes) streams.push_back(lane.stream());
  }
}

void Link::release(Stream stream) const {
  const ArenaConfig& config = arena_.config();
  for (int slot = 0; slot < config.num_slots; ++slot) {
    device_->writeValue(stream, &mine_.credit[slot], 1);
    device_->writeValue(stream, &mine_.full[slot], 1);
  }
  for (int lane = 0; lane < config.num_lanes; ++lane) {
    device_->writeValue(stream, &mine_.clear[lane], 1);
    device_->writeValue(stream, &mine_.landed[lane], 1);
  }
}

}  // namespace hdpcomm::device
