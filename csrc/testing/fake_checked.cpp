// The fake on devices in check mode, where an operation has to be work of streams whose order the
// check knows: a message is copied into memory of the fake by a kernel of the sender's and out of
// it by one of the receiver's, with flags between them that no other message uses.
//
// The transfers of a group are on streams of their own, so only NCCL's order holds: each after what
// the group's stream held, and before what it gets next; operations of a rank one after the other.
#include <cstring>
#include <utility>

#include "testing/fake_nccl.hpp"

namespace hdpcomm::testing {

// The n-th message of a pair; whichever end is issued first makes it.
FakeNccl::Staged* FakeNccl::stagedOf(int source, int target, size_t number, size_t bytes) {
  auto& messages = staged_[{source, target}];
  while (messages.size() <= number) messages.emplace_back();
  Staged& staged = messages[number];
  if (!staged.data) {
    staged.data = std::make_unique<std::byte[]>(bytes);
    staged.bytes = bytes;
  }
  if (staged.bytes == bytes) return &staged;
  last_error_ = "message " + std::to_string(number) + " from rank " + std::to_string(source) +
                " to rank " + std::to_string(target) + " has " + std::to_string(staged.bytes) +
                " bytes on one side and " + std::to_string(bytes) + " on the other";
  return nullptr;  // it never ends
}

FakeNccl::StagedWhole& FakeNccl::stagedWholeOf(size_t number) {
  while (staged_wholes_.size() <= number) {
    auto& staged = staged_wholes_.emplace_back();
    staged.given.resize(ranks_.size());
    staged.in.resize(ranks_.size());
  }
  return staged_wholes_[number];
}

void FakeNccl::launchChecked(Rank& rank) {
  Item item;
  {
    const auto held = lock();
    if (rank.stream.empty()) return;
    item = std::move(rank.stream.back());
    rank.stream.pop_back();
  }
  const Stream stream = rank.device_stream;
  DeviceApi& device = *rank.device;
  if (rank.last) device.wait(stream, rank.last.get());
  if (item.whole) {
    launchWhole(rank, item.whole, stream);
  } else {
    launchGroup(rank, item.group, stream);
  }
  if (!rank.last) rank.last = OwnedEvent(rank.device, device.createEvent());
  device.record(rank.last.get(), stream);
}

void FakeNccl::launchGroup(Rank& rank, const std::vector<Transfer>& group, Stream stream) {
  DeviceApi& device = *rank.device;
  const OwnedEvent begin(rank.device, device.createEvent());
  device.record(begin.get(), stream);
  for (size_t i = 0; i < group.size(); ++i) {
    const Transfer& transfer = group[i];
    if (i == rank.lanes.size()) rank.lanes.emplace_back(rank.device, device.createStream());
    const Stream lane = rank.lanes[i].get();
    Staged* staged = nullptr;
    {
      const auto held = lock();
      staged = transfer.isSend() ? stagedOf(rank.rank, transfer.peer,
                                            rank.issued_sends[transfer.peer]++, transfer.bytes)
                                 : stagedOf(transfer.peer, rank.rank,
                                            rank.issued_recvs[transfer.peer]++, transfer.bytes);
    }
    if (staged == nullptr) return;
    device.wait(lane, begin.get());
    const MemoryRange user{transfer.data, transfer.bytes};
    std::byte* const memory = staged->data.get();
    if (transfer.isSend()) {
      device.launch({.name = "nccl send",
                     .reads = {user},
                     .writes = {},
                     .cpu = [=] { std::memcpy(memory, user.data, user.bytes); },
                     .cuda = nullptr,
                     .signals = {{&staged->full, 1}}},
                    lane);
      device.waitValue(lane, &staged->taken, 1);
    } else {
      device.launch({.name = "nccl recv",
                     .reads = {},
                     .writes = {user},
                     .cpu = [=] { std::memcpy(const_cast<void*>(user.data), memory, user.bytes); },
                     .cuda = nullptr,
                     .waits = {{&staged->full, 1}},
                     .signals = {{&staged->taken, 1}}},
                    lane);
    }
    const OwnedEvent end(rank.device, device.createEvent());
    device.record(end.get(), lane);
    device.wait(stream, end.get());
  }
}

void FakeNccl::launchWhole(Rank& rank, const std::shared_ptr<Whole>& whole, Stream stream) {
  StagedWhole* staged = nullptr;
  {
    const auto held = lock();
    staged = &stagedWholeOf(rank.issued_wholes++);
  }
  const auto own = static_cast<size_t>(rank.rank);
  const auto [in_bytes, out_bytes] = extentOf(*whole);
  const bool gives = whole->root < 0 || whole->root == rank.rank;
  staged->in[own].resize(in_bytes);
  std::vector<MemoryRange> reads;
  if (gives) reads.push_back({whole->in, in_bytes});
  rank.device->launch({.name = "nccl give",
                       .reads = std::move(reads),
                       .writes = {},
                       .cpu =
                           [=, bytes = in_bytes] {
                             if (gives && bytes > 0)
                               std::memcpy(staged->in[own].data(), whole->in, bytes);
                           },
                       .cuda = nullptr,
                       .signals = {{&staged->given[own], 1}}},
                      stream);
  std::vector<FlagValue> all;
  for (uint32_t& given : staged->given) all.push_back({&given, 1});
  rank.device->launch({.name = "nccl take",
                       .reads = {},
                       .writes = {{whole->out, out_bytes}},
                       .cpu =
                           [=, this, bytes = out_bytes] {
                             std::vector<const std::byte*> ins;
                             for (const auto& each : staged->in) ins.push_back(each.data());
                             const std::vector<std::byte> result = combine(*whole, ins);
                             const size_t at =
                                 whole->op == OpCode::kReduceScatter ? own * bytes : 0;
                             if (bytes > 0) std::memcpy(whole->out, result.data() + at, bytes);
                           },
                       .cuda = nullptr,
                       .waits = std::move(all)},
                      stream);
}

}  // namespace hdpcomm::testing
