#include "offload/copy_engine.hpp"

#include <chrono>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::offload {

CopyEngine::CopyEngine(std::shared_ptr<PinnedPool> pool, double timeout_s)
    : pool_(std::move(pool)),
      device_(pool_->device()),
      timeout_s_(timeout_s),
      events_(std::make_shared<EventPool>(device_)),
      to_host_(device_, device_->createStream()),
      to_device_(device_, device_->createStream()) {
  if (!(timeout_s > 0)) {
    throwInvalidUsage("timeout is " + std::to_string(timeout_s) + " s; give a number above 0");
  }
}

CopyEngine::~CopyEngine() {
  try {
    drain(timeout_s_);
    for (auto& [ticket, entry] : entries_) pool_->release(entry.block, std::move(entry.last_copy));
  } catch (...) {
    // A copy may still read or write the arena, so the pool is leaked on purpose.
    static_cast<void>(new std::shared_ptr<PinnedPool>(pool_));
  }
}

CopyEngine::Entry& CopyEngine::find(Ticket ticket, const char* call) {
  const auto found = entries_.find(ticket);
  if (found == entries_.end()) {
    throwInvalidUsage(std::string(call) + ": ticket " + std::to_string(ticket) +
                      " was dropped, or belongs to another engine");
  }
  return found->second;
}

// The copy stream waits for earlier work of compute.
void CopyEngine::waitForCompute(Stream copies, Compute compute, Site site) {
  if (!compute) return;  // submission orders the host before the copy
  const Fence done = events_->record(*compute, site);
  device_->wait(copies, *done, site);
}

// Compute waits for the fence: its stream, or the calling thread.
void CopyEngine::makeComputeWait(Compute compute, const Fence& fence, Site site) {
  if (compute) {
    device_->wait(*compute, *fence, site);
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  device_->synchronize(*fence, timeout_s_, {}, site);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  const std::lock_guard lock(mutex_);
  stats_.host_wait_s += waited.count();
}

CopyEngine::Ticket CopyEngine::store(const void* source, size_t bytes, Compute compute) {
  const Stream stream = to_host_.get();
  std::byte* block = pool_->allocate(bytes, stream);
  if (block == nullptr) return 0;
  Entry entry{block, bytes, {}, false};
  try {
    waitForCompute(stream, compute, std::source_location::current());
    device_->copy(block, source, bytes, stream);
    entry.last_copy = events_->record(stream);
  } catch (...) {
    pool_->release(block, events_->record(stream));
    throw;
  }
  const std::lock_guard lock(mutex_);
  entries_.emplace(next_, std::move(entry));
  ++stats_.stores;
  stats_.bytes_stored += bytes;
  return next_++;
}

void CopyEngine::finishStore(Ticket ticket, Compute compute) {
  Fence copied;
  {
    const std::lock_guard lock(mutex_);
    Entry& entry = find(ticket, "finish_store");
    if (entry.stored) return;
    copied = entry.last_copy;
  }
  makeComputeWait(compute, copied, std::source_location::current());
  const std::lock_guard lock(mutex_);
  find(ticket, "finish_store").stored = true;
}

void CopyEngine::load(Ticket ticket, void* target, Compute compute) {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    entry = find(ticket, "load");
  }
  if (!entry.stored) {
    throwInvalidUsage("load: the store of ticket " + std::to_string(ticket) +
                      " is not finished, so its data is still on the device; call finish_store "
                      "first");
  }
  const Stream stream = to_device_.get();
  waitForCompute(stream, compute, std::source_location::current());
  device_->copy(target, entry.block, entry.bytes, stream);
  const Fence copied = events_->record(stream);
  const std::lock_guard lock(mutex_);
  find(ticket, "load").last_copy = copied;
  ++stats_.loads;
  stats_.bytes_loaded += entry.bytes;
}

void CopyEngine::finishLoad(Ticket ticket, Compute compute) {
  Fence copied;
  {
    const std::lock_guard lock(mutex_);
    copied = find(ticket, "finish_load").last_copy;
  }
  makeComputeWait(compute, copied, std::source_location::current());
}

void CopyEngine::drop(Ticket ticket) {
  Entry entry;
  {
    const std::lock_guard lock(mutex_);
    entry = std::move(find(ticket, "drop"));
    entries_.erase(ticket);
  }
  pool_->release(entry.block, std::move(entry.last_copy));
}

void CopyEngine::drain(double timeout_s) {
  device_->synchronize(to_host_.get(), timeout_s);
  device_->synchronize(to_device_.get(), timeout_s);
}

CopyStats CopyEngine::stats() const {
  const std::lock_guard lock(mutex_);
  CopyStats stats = stats_;
  stats.tickets = entries_.size();
  return stats;
}

}  // namespace hdpcomm::offload
