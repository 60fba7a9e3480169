#include "transport/stream/links/small_messages.hpp"

#include <algorithm>

#include "transport/stream/launch.hpp"

namespace hdpcomm::device {

using kernels::RelayItem;

SmallMessages::SmallMessages(DevicePtr device, const Arena& arena, int place)
    : device_(std::move(device)),
      arena_(arena),
      place_(place),
      most_(arena.config().small_bytes),
      peers_(static_cast<size_t>(arena.numRanks())),
      last_(device_, device_->createEvent()) {}

Lane& SmallMessages::lane() {
  if (!lane_) lane_.emplace(device_);
  return *lane_;
}

RelayItem SmallMessages::put(const Message& message) {
  int& next = peers_[static_cast<size_t>(message.place)].next_out;
  const int slot = next;
  next = (next + 1) % kSmallSlots;
  return {.dst = arena_.smallSlot(message.place, place_, slot),
          .src = message.data,
          .operand = nullptr,
          .bytes = static_cast<int64_t>(message.bytes),
          .wait = &arena_.flags(place_, message.place).small_credit[slot],
          .set = &arena_.flags(message.place, place_).small_full[slot]};
}

RelayItem SmallMessages::get(const Message& message) {
  int& next = peers_[static_cast<size_t>(message.place)].next_in;
  const int slot = next;
  next = (next + 1) % kSmallSlots;
  return {.dst = message.data,
          .src = arena_.smallSlot(place_, message.place, slot),
          .operand = message.operand,
          .bytes = static_cast<int64_t>(message.bytes),
          .wait = &arena_.flags(place_, message.place).small_full[slot],
          .set = &arena_.flags(message.place, place_).small_credit[slot]};
}

// Work that was captured into a graph and work that was not are kept in order by whoever replays
// the graph (docs/stream-transport.md).
void SmallMessages::begin(Stream stream) {
  used_ = true;
  const bool captured = device_->isCapturing(stream);
  const bool same = last_stream_ && *last_stream_ == stream;
  if (last_stream_ && !same && captured == last_captured_) {
    if (!captured || device_->isCapturing(*last_stream_)) device_->wait(stream, last_.get());
  }
  last_captured_ = captured;
}

void SmallMessages::end(Stream stream) {
  device_->record(last_.get(), stream);
  last_stream_ = stream;
}

// In rounds of as many messages of a pair and direction as there are slots, sends first, as Rounds
// do: what a kernel waits for is in a kernel of the peer that waits for none behind this one.
void SmallMessages::exchange(const std::vector<Message>& sends, const std::vector<Message>& recvs,
                             DType dtype, RedOp redop, Stream stream) {
  begin(stream);
  std::vector<bool> sent(sends.size());
  std::vector<bool> received(recvs.size());
  size_t left = sends.size() + recvs.size();
  while (left > 0) {
    std::vector<RelayItem> items;
    bool reduces = false;
    const auto take = [&](const std::vector<Message>& messages, std::vector<bool>& done, bool out) {
      std::vector<int> taken(peers_.size());
      for (size_t i = 0; i < messages.size(); ++i) {
        int& count = taken[static_cast<size_t>(messages[i].place)];
        if (done[i] || count == kSmallSlots) continue;
        ++count;
        done[i] = true;
        --left;
        items.push_back(out ? put(messages[i]) : get(messages[i]));
        reduces = reduces || items.back().operand != nullptr;
      }
    };
    take(sends, sent, true);
    take(recvs, received, false);
    for (size_t at = 0; at < items.size(); at += kernels::kMaxItems) {
      kernels::RelayArgs args;
      args.num_items = static_cast<int>(std::min<size_t>(items.size() - at, kernels::kMaxItems));
      std::copy_n(items.begin() + static_cast<std::ptrdiff_t>(at), args.num_items, args.items);
      if (reduces) {
        args.dtype = dtype;
        args.op = redop;
      }
      launchRelay(*device_, args, stream);
    }
  }
  end(stream);
}

void SmallMessages::reduce(const Reduction& reduction, Stream stream) {
  begin(stream);
  kernels::PushFoldArgs args;
  args.num_inputs = static_cast<int>(reduction.places.size());
  args.out = reduction.out;
  args.count = static_cast<int64_t>(reduction.count);
  args.dtype = reduction.dtype;
  args.op = reduction.redop;
  const size_t bytes = reduction.count * dtypeBytes(reduction.dtype);
  for (int i = 0; i < args.num_inputs; ++i) {
    const int place = reduction.places[static_cast<size_t>(i)];
    std::byte* part = reduction.parts[static_cast<size_t>(i)];
    if (i == reduction.own) {
      args.inputs[i] = part;
      continue;
    }
    args.pushes[args.num_pushes++] = put({place, part, bytes});
    const RelayItem incoming = get({place, nullptr, bytes});
    args.inputs[i] = incoming.src;
    args.waits[i] = incoming.wait;
    args.sets[i] = incoming.set;
  }
  launchPushFold(*device_, args, stream);
  end(stream);
}

void SmallMessages::addStreams(std::vector<Stream>& streams) const {
  if (lane_) streams.push_back(lane_->stream());
  // A caller's stream that waits in one of these kernels is among those of its operation.
}

void SmallMessages::release(Stream stream) const {
  if (!used_) return;
  std::vector<FlagOp> ops;
  for (int peer = 0; peer < arena_.numRanks(); ++peer) {
    PairFlags& mine = arena_.flags(place_, peer);
    for (uint32_t& flag : mine.small_credit) ops.push_back(FlagOp::write(&flag, 1));
    for (uint32_t& flag : mine.small_full) ops.push_back(FlagOp::write(&flag, 1));
  }
  device_->flagOps(stream, ops);
}

}  // namespace hdpcomm::device
