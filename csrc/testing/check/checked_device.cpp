#include "testing/check/checked_device.hpp"

#include <cstring>

#include "testing/check/device_check.hpp"
#include "testing/check/replay.hpp"

namespace hdpcomm::testing {
namespace check {
namespace {

// Key by which an import is ordered after the export of the same memory.
uint64_t keyOf(const MemoryHandle& handle) {
  uint64_t key = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char byte : handle.bytes) key = (key ^ byte) * 0x100000001b3;
  return key;
}

}  // namespace

std::shared_ptr<MemoryDevice> CheckedDevice::open(int ordinal) {
  auto session = Session::current();
  return session != nullptr ? std::make_shared<CheckedDevice>(ordinal, std::move(session))
                            : nullptr;
}

CheckedDevice::CheckedDevice(int ordinal, std::shared_ptr<Session> session)
    : StreamDevice(ordinal), session_(std::move(session)) {
  streams_[0] = session_->addStream(ordinal);
}

void* CheckedDevice::allocate(size_t bytes, Site site) {
  void* memory = MemoryTable::get().allocate(bytes, this);
  session_->allocated(memory, bytes, site);
  return memory;
}

void CheckedDevice::free(void* memory, Site site) {
  const size_t bytes = MemoryTable::get().blockBytes(memory);
  session_->freed(MemoryTable::get().release(memory, this), bytes, site);
}

void* CheckedDevice::allocatePinned(size_t bytes, Site site) {
  void* memory = MemoryTable::get().allocatePinned(bytes, this);
  session_->allocated(memory, bytes, site);
  return memory;
}

void CheckedDevice::freePinned(void* memory, Site site) {
  const size_t bytes = MemoryTable::get().blockBytes(memory);
  session_->freed(MemoryTable::get().releasePinned(memory, this), bytes, site);
}

MemoryHandle CheckedDevice::exportMemory(void* memory) {
  const MemoryHandle handle = MemoryDevice::exportMemory(memory);
  session_->ordered(NodeKind::kRelease, keyOf(handle));
  return handle;
}

void* CheckedDevice::importMemory(const MemoryHandle& handle) {
  void* memory = MemoryDevice::importMemory(handle);
  session_->ordered(NodeKind::kAcquire, keyOf(handle));
  return memory;
}

Stream CheckedDevice::createStream(int) { return add(session_->addStream(ordinal())); }

void CheckedDevice::destroyStream(Stream stream) { remove(stream); }

void CheckedDevice::record(Event event, Stream stream, Site site) {
  mark(event, {session_->record(find(stream), find(event).node, site)});
}

void CheckedDevice::wait(Stream stream, Event event, Site site) {
  session_->waitEvent(find(stream), find(event).node, site);
}

bool CheckedDevice::query(Event event) { return session_->query(find(event).node); }

void CheckedDevice::synchronize(Event event, double timeout_s, const InterruptCheck& check,
                                Site site) {
  checkTimeout(timeout_s);
  session_->synchronizeEvent(find(event).node, timeout_s, check, site);
}

void CheckedDevice::synchronize(Stream stream, double timeout_s, const InterruptCheck& check,
                                Site site) {
  checkTimeout(timeout_s);
  session_->synchronizeStream(find(stream), timeout_s, check, site);
}

void CheckedDevice::storeFlag(uint32_t* flag, uint32_t value, Site site) {
  checkFlag("storeFlag", flag);
  session_->storeFlag(flag, value, site);
}

void CheckedDevice::annotateRead(const void* data, size_t bytes, Site site) {
  session_->touched(NodeKind::kHostRead, data, bytes, site);
}

void CheckedDevice::annotateWrite(void* data, size_t bytes, Site site) {
  session_->touched(NodeKind::kHostWrite, data, bytes, site);
}

void CheckedDevice::annotateFree(const void* data, size_t bytes, Site site) {
  session_->touched(NodeKind::kHostFree, data, bytes, site);
}

void CheckedDevice::annotateRelease(uint64_t key) { session_->ordered(NodeKind::kRelease, key); }
void CheckedDevice::annotateAcquire(uint64_t key) { session_->ordered(NodeKind::kAcquire, key); }

}  // namespace check

DeviceCheck::DeviceCheck(uint64_t seed) : session_(std::make_shared<check::Session>(seed)) {
  check::Session::begin(session_);
}

DeviceCheck::~DeviceCheck() { session_->end(); }

void DeviceCheck::enterRank(int rank) { session_->enterRank(rank); }
void DeviceCheck::leaveRank() { session_->leaveRank(); }
void DeviceCheck::finish() { session_->end(); }

std::vector<CheckReport> DeviceCheck::reports(const std::optional<OrderingSite>& ignore) const {
  session_->checkEnded();
  return check::Replay(session_->trace(), session_->seed(), ignore).run();
}

std::vector<OrderingSite> DeviceCheck::orderingSites() const {
  session_->checkEnded();
  std::vector<OrderingSite> sites;
  for (const check::Node& node : session_->trace().nodes) {
    if (!check::isOrdering(node) || node.abandoned) continue;
    const std::string call = check::orderingCall(node);
    const auto known = std::find_if(sites.begin(), sites.end(), [&](const OrderingSite& site) {
      return site.call == call && check::sameSite(site.site, node.site);
    });
    if (known != sites.end()) {
      ++known->uses;
    } else {
      sites.push_back({call, node.site, 1});
    }
  }
  std::sort(sites.begin(), sites.end(), [](const OrderingSite& a, const OrderingSite& b) {
    return std::make_tuple(std::string(a.site.file), a.site.line, a.call) <
           std::make_tuple(std::string(b.site.file), b.site.line, b.call);
  });
  return sites;
}

uint64_t DeviceCheck::numOperations() const {
  session_->checkEnded();
  return session_->trace().nodes.size();
}

}  // namespace hdpcomm::testing
