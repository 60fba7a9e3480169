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

// A piece on either side, with the fork and the join of its lane.
constexpr size_t kPieceOperations = 7;

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

void FlagBatch::take(uint32_t* flag, Site site) {
  ops_[count_++] = FlagOp::wait(flag, 1, site);
  ops_[count_++] = FlagOp::write(flag, 0, site);
}

void FlagBatch::set(uint32_t* flag, Site site) { ops_[count_++] = FlagOp::write(flag, 1, site); }

void FlagBatch::flush(DeviceApi& device, Stream stream) {
  if (count_ > 0) device.flagOps(stream, {ops_.data(), count_});
  count_ = 0;
}

Link::Link(DevicePtr device, const Arena& arena, int rank, int peer)
    : device_(std::move(device)),
      arena_(arena),
      rank_(rank),
      peer_(peer),
      mine_(arena.flags(rank, peer)),
      theirs_(arena.flags(peer, rank)) {}

// The lane of a slot, or of a part of a landing message.
Lane& Link::lane(std::vector<Lane>& lanes, int index) {
  // Made on first use, all together: a Fork holds their addresses.
  if (lanes.empty()) {
    const auto count = static_cast<size_t>(arena_.config().num_lanes);
    lanes.reserve(count);
    while (lanes.size() < count) lanes.emplace_back(device_);
  }
  return lanes[static_cast<size_t>(index) % lanes.size()];
}

// Most bytes of a piece of such a message: a slot, or less, so that all lanes have a share.
size_t Link::pieceBytes(size_t bytes) const {
  const ArenaConfig& config = arena_.config();
  const auto lanes = static_cast<size_t>(config.num_lanes);
  const size_t share = ((bytes + lanes - 1) / lanes + 511) / 512 * 512;
  return std::min(config.slot_bytes, std::max(kShareBytes, share));
}

// An empty message is one empty piece: the receiver waits for it all the same.
Link::Piece Link::next(size_t bytes, Progress& progress) const {
  const Piece piece{progress.bytes, std::min(pieceBytes(bytes), bytes - progress.bytes)};
  progress.bytes += piece.bytes;
  progress.complete = progress.bytes == bytes;
  return piece;
}

// Flags of a lane: of a piece that ends, and of the next one.
class Link::LaneFlags {
 public:
  LaneFlags(DeviceApi& device, Lane& lane) : device_(device), lane_(lane) {}

  FlagBatch& batch() { return batch_; }
  void flush() { batch_.flush(device_, lane_.stream()); }
  Lane& lane() { return lane_; }
  static std::vector<LaneFlags>::iterator find(std::vector<LaneFlags>& all, const Lane& lane) {
    return std::find_if(all.begin(), all.end(), [&](LaneFlags& f) { return &f.lane_ == &lane; });
  }

 private:
  DeviceApi& device_;
  Lane& lane_;
  FlagBatch batch_;
};

// The lanes of the next `pieces` pieces, with room for them on each: once the first piece is on its
// way, the host does not wait before the last flag is written.
std::vector<Link::LaneFlags> Link::enter(std::vector<Lane>& lanes, int next_slot, size_t bytes,
                                         const Progress& progress, int pieces, Fork& fork,
                                         const WaitCheck& check) {
  const ArenaConfig& config = arena_.config();
  const size_t most = pieceBytes(bytes);
  const size_t left = (bytes - progress.bytes + most - 1) / most;
  const size_t count = std::min(static_cast<size_t>(pieces), std::max<size_t>(left, 1));
  std::vector<LaneFlags> entered;
  entered.reserve(static_cast<size_t>(config.num_lanes));
  for (size_t i = 0; i < count; ++i) {
    Lane& lane = this->lane(lanes, (next_slot + static_cast<int>(i)) % config.num_slots);
    lane.pass(kPieceOperations, check);
    if (LaneFlags::find(entered, lane) == entered.end()) entered.emplace_back(*device_, lane);
    fork.enter(lane);
  }
  return entered;
}

int Link::send(const std::byte* data, size_t bytes, Progress& progress, int pieces, Fork& fork,
               const WaitCheck& check) {
  auto lanes = enter(out_, next_out_slot_, bytes, progress, pieces, fork, check);
  int count = 0;
  for (; count < pieces && !progress.complete; ++count) {
    const Piece piece = next(bytes, progress);
    const int slot = next_out_slot_;
    next_out_slot_ = (slot + 1) % arena_.config().num_slots;
    sendPiece(data + piece.offset, piece.bytes, slot, *LaneFlags::find(lanes, lane(out_, slot)));
  }
  for (LaneFlags& flags : lanes) flags.flush();
  return count;
}

void Link::sendPiece(const std::byte* data, size_t bytes, int slot, LaneFlags& flags) {
  const Stream stream = flags.lane().stream();
  flags.batch().take(&mine_.credit[slot]);
  flags.flush();
  std::byte* to = arena_.slot(peer_, rank_, slot);
  if (bytes > 0 && bytes <= kFusedBytes) {
    launchPut(*device_, {to, data, static_cast<int64_t>(bytes), &theirs_.full[slot], 1}, stream);
    return;
  }
  device_->copy(to, data, bytes, stream);
  flags.batch().set(&theirs_.full[slot]);
}

int Link::receive(const Incoming& message, Progress& progress, int pieces, Fork& fork,
                  const WaitCheck& check) {
  auto lanes = enter(in_, next_in_slot_, message.bytes, progress, pieces, fork, check);
  int count = 0;
  for (; count < pieces && !progress.complete; ++count) {
    const Piece piece = next(message.bytes, progress);
    const int slot = next_in_slot_;
    next_in_slot_ = (slot + 1) % arena_.config().num_slots;
    receivePiece(message, piece, slot, *LaneFlags::find(lanes, lane(in_, slot)));
  }
  for (LaneFlags& flags : lanes) flags.flush();
  return count;
}

void Link::receivePiece(const Incoming& message, const Piece& piece, int slot, LaneFlags& flags) {
  const Stream stream = flags.lane().stream();
  flags.batch().take(&mine_.full[slot]);
  flags.flush();
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
  flags.batch().set(&theirs_.credit[slot]);
}

// The first lane, behind the landing messages of the direction.
Stream Link::enterForLanding(bool out, Fork& fork, const WaitCheck& check) {
  Lane& lane = firstLane(out);
  lane.pass(kPieceOperations, check);
  const Stream stream = fork.enter(lane);
  followLandings(out, stream, device_->isCapturing(stream));
  return stream;
}

void Link::copyToLanding(const std::byte* data, size_t bytes, size_t offset, Stream stream) {
  device_->copy(arena_.landing(peer_) + offset, data, bytes, stream);
}

void Link::put(const std::byte* data, size_t bytes, size_t offset, Fork& fork,
               const WaitCheck& check) {
  const Stream stream = enterForLanding(true, fork, check);
  FlagBatch flags;
  awaitClear(flags);
  flags.flush(*device_, stream);
  copyToLanding(data, bytes, offset, stream);
  tellLanded(flags);
  flags.flush(*device_, stream);
}

void Link::clear(Fork& fork, const WaitCheck& check) {
  FlagBatch flags;
  tellClear(flags);
  flags.flush(*device_, enterForLanding(false, fork, check));
}

void Link::land(bool cleared, Fork& fork, const WaitCheck& check) {
  FlagBatch flags;
  if (!cleared) tellClear(flags);
  awaitLanded(flags);
  flags.flush(*device_, enterForLanding(false, fork, check));
}

void Link::addStreams(std::vector<Stream>& streams) const {
  for (const auto* lanes : {&out_, &in_}) {
    for (const Lane& lane : *lanes) streams.push_back(lane.stream());
  }
}

void Link::release(Stream stream) const {
  const ArenaConfig& config = arena_.config();
  std::vector<FlagOp> ops;
  for (int slot = 0; slot < config.num_slots; ++slot) {
    ops.push_back(FlagOp::write(&mine_.credit[slot], 1));
    ops.push_back(FlagOp::write(&mine_.full[slot], 1));
  }
  ops.push_back(FlagOp::write(&mine_.clear, 1));
  ops.push_back(FlagOp::write(&mine_.landed, 1));
  device_->flagOps(stream, ops);
}

}  // namespace hdpcomm::device
