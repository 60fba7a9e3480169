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
      events_(std::make_shared<EventPool>(device_)),
      peers_(static_cast<size_t>(arena.numRanks())) {}

int SmallMessages::nextSlot(int place, bool out) {
  int& next = at(place).next_slot[out];
  const int slot = next;
  next = (next + 1) % kSmallSlots;
  return slot;
}

RelayItem SmallMessages::put(const Message& message) {
  const int slot = nextSlot(message.place, true);
  return {.dst = arena_.smallSlot(message.place, place_, slot),
          .src = message.data,
          .operand = nullptr,
          .bytes = static_cast<int64_t>(message.bytes),
          .wait = &arena_.flags(place_, message.place).small_credit[slot],
          .set = &arena_.flags(message.place, place_).small_full[slot]};
}

RelayItem SmallMessages::get(const Message& message) {
  const int slot = nextSlot(message.place, false);
  return {.dst = message.data,
          .src = arena_.smallSlot(place_, message.place, slot),
          .operand = message.operand,
          .bytes = static_cast<int64_t>(message.bytes),
          .wait = &arena_.flags(place_, message.place).small_full[slot],
          .set = &arena_.flags(message.place, place_).small_credit[slot]};
}

bool SmallMessages::pending(int place, bool out, Stream stream, bool captured) {
  return device::pending(*device_, at(place).last[out], stream, captured);
}

void SmallMessages::follow(const Messages& messages, bool out, Stream stream, bool captured) {
  used_ = true;
  std::vector<const Mark*> waited;
  for (const Message& message : messages) {
    if (!pending(message.place, out, stream, captured)) continue;
    const Mark* last = at(message.place).last[out].get();
    if (std::find(waited.begin(), waited.end(), last) != waited.end()) continue;
    waited.push_back(last);
    device_->wait(stream, *last->end);
  }
}

MarkPtr SmallMessages::mark(Stream stream, bool captured) {
  return std::make_shared<Mark>(Mark{events_->record(stream), stream, captured});
}

// In rounds of as many messages of a pair and direction as there are slots, sends first, as Rounds
// do: what a kernel waits for is in a kernel of the peer that waits for none behind this one.
MarkPtr SmallMessages::exchange(const Messages& sends, const Messages& recvs, DType dtype,
                                RedOp redop, Stream stream) {
  const bool captured = device_->isCapturing(stream);
  follow(sends, true, stream, captured);
  follow(recvs, false, stream, captured);
  std::vector<bool> sent(sends.size());
  std::vector<bool> received(recvs.size());
  size_t left = sends.size() + recvs.size();
  while (left > 0) {
    std::vector<RelayItem> items;
    bool reduces = false;
    const auto take = [&](const Messages& messages, std::vector<bool>& done, bool out) {
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
    for (size_t from = 0; from < items.size(); from += kernels::kMaxItems) {
      kernels::RelayArgs args;
      args.num_items = static_cast<int>(std::min<size_t>(items.size() - from, kernels::kMaxItems));
      std::copy_n(items.begin() + static_cast<std::ptrdiff_t>(from), args.num_items, args.items);
      if (reduces) {
        args.dtype = dtype;
        args.op = redop;
      }
      launchRelay(*device_, args, stream);
    }
  }
  const MarkPtr end = mark(stream, captured);
  for (const Message& message : sends) at(message.place).last[true] = end;
  for (const Message& message : recvs) at(message.place).last[false] = end;
  return end;
}

MarkPtr SmallMessages::reduce(const Reduction& reduction, Stream stream) {
  const bool captured = device_->isCapturing(stream);
  kernels::PushFoldArgs args;
  args.num_inputs = static_cast<int>(reduction.places.size());
  args.out = reduction.out;
  args.count = static_cast<int64_t>(reduction.count);
  args.dtype = reduction.dtype;
  args.op = reduction.redop;
  const size_t bytes = reduction.count * dtypeBytes(reduction.dtype);
  Messages others;
  for (int i = 0; i < args.num_inputs; ++i) {
    const int place = reduction.places[static_cast<size_t>(i)];
    std::byte* part = reduction.parts[static_cast<size_t>(i)];
    if (i == reduction.own) {
      args.inputs[i] = part;
      continue;
    }
    others.push_back({place, part, bytes});
    args.pushes[args.num_pushes++] = put(others.back());
    const RelayItem incoming = get(others.back());
    args.inputs[i] = incoming.src;
    args.waits[i] = incoming.wait;
    args.sets[i] = incoming.set;
  }
  follow(others, true, stream, captured);
  follow(others, false, stream, captured);
  launchPushFold(*device_, args, stream);
  const MarkPtr end = mark(stream, captured);
  for (const Message& message : others) at(message.place).last = {end, end};
  return end;
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
