// Messages that are put into a window of the receiver (NCCL 2.29: ncclPutSignal, ncclWaitSignal).
//
// A receiver signals that the place is free; the sender waits for that signal and puts; the put's
// own signal tells the receiver that the message is there. NCCL counts the signals of a pair in
// each direction, and keeps the order of what goes to one peer. So in an exchange every rank first
// sends its signals of free places, then its puts, and awaits those of its peers in the same order.
// No rank waits for a signal of a later operation than its own, so the one order of all operations
// keeps this free of deadlocks, too.
//
// NCCL's side (nccl.h 2.32.3; nccl#2238, #1904): a put's source lies in a registered window, and
// the put is done for the sender's stream when the source may be written again; copy engines carry
// it inside an NVLink domain, a thread of the host and the network between them, no SM takes part.
#include <map>
#include <utility>

#include "base/error.hpp"
#include "transport/stream/nccl/nccl_world.hpp"

namespace hdpcomm {
namespace {

// The only ones that 2.29 has; flags are reserved.
constexpr int kSignal = 0;
constexpr int kContext = 0;
constexpr unsigned kFlags = 0;

}  // namespace

std::string NcclWorld::putsMissing() {
  checkUsable();
  if (api_->putSignal == nullptr) {
    return api_->path + " is NCCL " + ncclVersionText(api_->version) + ", and at least " +
           ncclVersionText(kOldestOneSidedNccl) + " is needed";
  }
  NcclProperties properties;
  checkResult(api_->commQueryProperties(comm_, &properties), "ncclCommQueryProperties");
  return properties.host_rma ? "" : "NCCL says that these devices and networks do not support it";
}

void NcclWorld::openWindow(size_t bytes, NcclStream stream, const WaitCheck& check) {
  checkUsable();
  checkResult(api_->memAlloc(&window_memory_, bytes), "ncclMemAlloc");
  await(api_->commWindowRegister(comm_, window_memory_, bytes, &window_, kNcclSymmetricWindow),
        "ncclCommWindowRegister", check);
  const auto peer = [this](int distance) { return (rank_ + size_ + distance) % size_; };
  const Counts counts = counts_;  // this put does not count
  const std::vector<bool> used = used_;
  const Messages to{{window() + bytes - 1, 1, peer(1), 0}};
  const Messages from{{window(), 1, peer(-1), 0}};
  put(to, from, stream, check);
  awaitSignals(from, stream, check);
  counts_ = counts;
  used_ = used;
}

void NcclWorld::closeWindow(const WaitCheck& check) {
  if (comm_ != nullptr && window_ != nullptr) {
    await(api_->commWindowDeregister(comm_, std::exchange(window_, nullptr)),
          "ncclCommWindowDeregister", check);
  }
  freeWindow();
}

void NcclWorld::freeWindow() noexcept {
  if (window_memory_ != nullptr) api_->memFree(window_memory_);
  window_memory_ = nullptr;
  window_ = nullptr;
}

void NcclWorld::awaitSignals(const Messages& messages, NcclStream stream, const WaitCheck& check) {
  std::map<int, int> counts;
  for (const Message& each : messages) ++counts[each.peer];
  if (counts.empty()) return;
  std::vector<NcclWaitSignal> signals;
  for (const auto& [peer, count] : counts) {
    signals.push_back({.count = count, .peer = peer, .signal = kSignal, .context = kContext});
  }
  await(api_->waitSignal(static_cast<int>(signals.size()), signals.data(), comm_, stream),
        "ncclWaitSignal", check);
}

void NcclWorld::put(const Messages& sends, const Messages& recvs, NcclStream stream,
                    const WaitCheck& check) {
  if (!recvs.empty()) {
    group(check, [&] {
      for (const Message& each : recvs) {
        countReceived(each.bytes, each.peer);
        checkResult(api_->sendSignal(each.peer, kSignal, kContext, kFlags, comm_, stream),
                    "ncclSignal");
      }
    });
  }
  awaitSignals(sends, stream, check);
  if (sends.empty()) return;
  group(check, [&] {
    for (const Message& each : sends) {
      countSent(each.bytes, each.peer);
      ++counts_.puts;
      checkResult(api_->putSignal(each.data, each.bytes, kByteType, each.peer, window_, each.place,
                                  kSignal, kContext, kFlags, comm_, stream),
                  "ncclPutSignal");
    }
  });
}

}  // namespace hdpcomm
