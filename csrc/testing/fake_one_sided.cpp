// The fake's one-sided messages.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "testing/fake_nccl.hpp"

namespace hdpcomm::testing {
namespace {

bool contains(const MemoryRange& range, const void* data, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(range.data);
  const auto* at = static_cast<const std::byte*>(data);
  return at >= begin && at + bytes <= begin + range.bytes;
}

size_t numberOf(NcclWindow window) { return reinterpret_cast<size_t>(window) - 1; }

}  // namespace

void FakeNccl::delay(const std::string& function) {
  double seconds = 0;
  {
    const auto held = lock();
    const auto found = delays_.find(function);
    if (found != delays_.end()) seconds = found->second;
  }
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// A handle means the same window on all ranks. Symmetric ones are of one size.
int FakeNccl::openWindow(Rank& rank, void* memory, size_t bytes, NcclWindow* window) {
  *window = nullptr;
  if (!puts_) return kNcclSuccess;
  const size_t number = rank.windows.size();
  for (const Rank& other : ranks_) {
    if (other.windows.size() <= number || other.windows[number].bytes == bytes) continue;
    last_error_ = "windows of " + std::to_string(bytes) + " and " +
                  std::to_string(other.windows[number].bytes) + " bytes";
    return kNcclInvalidArgument;
  }
  rank.windows.push_back({memory, bytes});
  *window = reinterpret_cast<NcclWindow>(number + 1);
  return kNcclSuccess;
}

// Ranks without a device are all driven by one thread, which cannot wait for them.
bool FakeNccl::windowsOpen(const Rank& rank) const {
  return rank.device == nullptr ||
         std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& other) {
           return other.windows.size() >= rank.windows.size();
         });
}

int FakeNccl::closeWindow(Rank& rank, NcclWindow window) {
  const size_t number = numberOf(window);
  if (number >= rank.windows.size() || rank.windows[number].bytes == 0) {
    last_error_ = "no such window";
    return kNcclInvalidArgument;
  }
  rank.windows[number] = {};
  return kNcclSuccess;
}

// Windows are of one size on all ranks.
int FakeNccl::put(Rank& rank, const void* data, size_t bytes, int peer, NcclWindow window,
                  size_t offset) {
  const size_t number = numberOf(window);
  const bool placed = number < rank.windows.size() && offset <= rank.windows[number].bytes &&
                      bytes <= rank.windows[number].bytes - offset;
  const bool from_window =
      std::any_of(rank.windows.begin(), rank.windows.end(),
                  [&](const MemoryRange& own) { return contains(own, data, bytes); });
  if (!placed || !from_window) {
    last_error_ = "a put of " + std::to_string(bytes) + " bytes " +
                  (placed ? "that lie in no window" : "beyond the window's end");
    return kNcclInvalidArgument;
  }
  return enqueue(rank, {.kind = Kind::kPut,
                        .peer = peer,
                        .data = const_cast<void*>(data),
                        .bytes = bytes,
                        .window = number,
                        .place = offset});
}

std::byte* FakeNccl::targetOf(const Transfer& put) const {
  const MemoryRange& window = ranks_[static_cast<size_t>(put.peer)].windows[put.window];
  return static_cast<std::byte*>(const_cast<void*>(window.data)) + put.place;
}

// Runs the next one-sided operation of the group at the head of the stream, if it can run.
bool FakeNccl::advance(Rank& rank, Item& item) {
  item.posted = true;
  for (Transfer& transfer : item.group) {
    if (transfer.done) continue;
    const Rank& peer = ranks_[static_cast<size_t>(transfer.peer)];
    if (transfer.kind == Kind::kWait) {
      uint32_t& waited = rank.waited[transfer.peer];
      if (signals_[{transfer.peer, rank.rank}] - waited < transfer.signals) return false;
      waited += transfer.signals;
    } else {
      if (transfer.kind == Kind::kPut && !peer.aborted) {
        std::memmove(targetOf(transfer), transfer.data, transfer.bytes);
      }
      ++signals_[{rank.rank, transfer.peer}];
    }
    transfer.done = true;
    if (&transfer == &item.group.back()) finish(rank);
    return true;
  }
  return false;
}

std::string FakeNccl::signalsLeft(bool retired) const {
  for (const auto& [pair, count] : signals_) {
    const Rank& source = ranks_[static_cast<size_t>(pair.first)];
    const Rank& target = ranks_[static_cast<size_t>(pair.second)];
    const bool counts =
        retired ? source.retired && target.retired : !source.aborted && !target.aborted;
    const auto waited = target.waited.find(pair.first);
    const uint32_t left = count - (waited == target.waited.end() ? 0 : waited->second);
    if (left == 0 || !counts) continue;
    return "rank " + std::to_string(pair.second) + " has not waited for " + std::to_string(left) +
           " signals of rank " + std::to_string(pair.first);
  }
  return "";
}

// In check mode: kernels that write into the memory of others, and flags that hold the number of
// signals that one rank has sent to another.
void FakeNccl::launchOneSided(Rank& rank, const std::vector<Transfer>& group, Stream stream) {
  for (const Transfer& transfer : group) {
    KernelLaunch kernel;
    std::byte* to = nullptr;
    {
      const auto held = lock();
      if (transfer.kind == Kind::kPut) to = targetOf(transfer);
      if (transfer.kind == Kind::kWait) {
        kernel.waits = {
            {&flags_[{transfer.peer, rank.rank}], rank.waited[transfer.peer] += transfer.signals}};
      } else {
        kernel.signals = {{&flags_[{rank.rank, transfer.peer}], ++rank.signalled[transfer.peer]}};
      }
    }
    kernel.name = transfer.kind == Kind::kPut      ? "nccl put"
                  : transfer.kind == Kind::kSignal ? "nccl signal"
                                                   : "nccl wait";
    kernel.cpu = [] {};
    if (transfer.kind == Kind::kPut) {
      kernel.reads = {{transfer.data, transfer.bytes}};
      kernel.writes = {{to, transfer.bytes}};
      kernel.cpu = [=, from = transfer.data, bytes = transfer.bytes] {
        std::memmove(to, from, bytes);
      };
    }
    rank.device->launch(std::move(kernel), stream);
  }
}

}  // namespace hdpcomm::testing
