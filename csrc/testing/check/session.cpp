// Recording the operations of a check.
#include "testing/check/session.hpp"

#include <algorithm>

#include "device/simulated/wait.hpp"

namespace hdpcomm::testing::check {
namespace {

constexpr unsigned char kNewPoison = 0xDB;
constexpr unsigned char kFreedPoison = 0xDD;
constexpr size_t kPoisonBytes = size_t{4} << 20;  // per block, so that unused pages stay unmapped

std::mutex current_mutex;
std::weak_ptr<Session> current_session;

}  // namespace

Session::Session(uint64_t seed)
    : seed_(seed), mode_(static_cast<Mode>(seed % 3)), random_(seed ^ 0x9e3779b97f4a7c15) {}

std::shared_ptr<Session> Session::current() {
  const std::lock_guard lock(current_mutex);
  return current_session.lock();
}

void Session::begin(const std::shared_ptr<Session>& session) {
  const std::lock_guard lock(current_mutex);
  if (current_session.lock() != nullptr) {
    throwInvalidUsage("a check runs already in this process: finish it first");
  }
  current_session = session;
}

void Session::end() {
  {
    const std::lock_guard lock(current_mutex);
    if (current_session.lock().get() == this) current_session.reset();
  }
  const std::lock_guard lock(mutex_);
  running_ = false;
  ops_.clear();
  changed_.notify_all();
}

void Session::checkRunning() const {
  if (!running_) {
    throwInvalidUsage("the check that this simulated device belongs to has ended: open a new one");
  }
  if (fault_) throw *fault_;
}

void Session::checkEnded() {
  const std::lock_guard lock(mutex_);
  if (running_) throwInvalidUsage("the check still runs: call finish() before you ask for results");
}

int Session::addEntity(std::string name, std::vector<int64_t> key) {
  trace_.entities.push_back({std::move(name), std::move(key), {}});
  return static_cast<int>(trace_.entities.size()) - 1;
}

int Session::host() {
  const auto id = std::this_thread::get_id();
  if (const auto found = hosts_.find(id); found != hosts_.end()) return found->second;
  const auto number = static_cast<int64_t>(hosts_.size());
  return hosts_[id] = addEntity("host thread " + std::to_string(number), {0, 1 << 30, number});
}

void Session::enterRank(int rank) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  const auto known = hosts_of_ranks_.find(rank);
  const int entity = known != hosts_of_ranks_.end()
                         ? known->second
                         : addEntity("host of rank " + std::to_string(rank), {0, rank, 0});
  hosts_of_ranks_[rank] = entity;
  hosts_[std::this_thread::get_id()] = entity;
  ranks_.insert(entity);
}

void Session::leaveRank() {
  const std::lock_guard lock(mutex_);
  ranks_.erase(host());
  hosts_.erase(std::this_thread::get_id());
  changed_.notify_all();
}

int Session::addStream(int device) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  const int number = streams_of_device_[device]++;
  const int entity =
      addEntity("stream " + std::to_string(number) + " of device " + std::to_string(device),
                {1, device, number});
  streams_[entity];
  return entity;
}

NodeId Session::append(int entity, Node node) {
  const auto id = static_cast<NodeId>(trace_.nodes.size());
  node.entity = entity;
  node.host = host();
  if (node.host != entity) {
    const auto& before = trace_.entities[static_cast<size_t>(node.host)].nodes;
    if (!before.empty()) node.submitted = before.back();
  }
  auto& nodes = trace_.entities[static_cast<size_t>(entity)].nodes;
  node.position = nodes.size();
  nodes.push_back(id);
  trace_.nodes.push_back(std::move(node));
  return id;
}

NodeId Session::appendHost(Node node) { return append(host(), std::move(node)); }

void Session::addFlag(const uint32_t* flag) {
  if (!trace_.flags.contains(flag)) trace_.flags.emplace(flag, loadWord(flag));
}

// Records which flags a plain write, which has just been made, has overwritten.
void Session::noteOverwrittenFlags(NodeId id) {
  Node& node = at(id);
  for (const MemoryRange& range : node.writes) {
    const auto* begin = static_cast<const std::byte*>(range.data);
    auto flag = trace_.flags.lower_bound(reinterpret_cast<const uint32_t*>(begin));
    for (; flag != trace_.flags.end(); ++flag) {
      if (reinterpret_cast<const std::byte*>(flag->first) >= begin + range.bytes) break;
      node.overwritten.emplace_back(flag->first, loadWord(flag->first));
    }
  }
}

void Session::submitFlag(int stream, NodeKind kind, const FlagValue& flag, bool of_kernel, Op op) {
  addFlag(flag.flag);
  Node node;
  node.kind = kind;
  node.of_kernel = of_kernel;
  node.name = of_kernel ? op.kernel.name : "";
  node.site = op.site;
  node.flag = flag;
  append(stream, std::move(node));
}

void Session::submit(int stream, Op op) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  if (op.kind == OpKind::kWriteValue || op.kind == OpKind::kWaitValue) {
    const auto kind = op.kind == OpKind::kWriteValue ? NodeKind::kWriteValue : NodeKind::kWaitValue;
    const FlagValue flag = op.flag;
    submitFlag(stream, kind, flag, false, std::move(op));
    return stepSome();
  }
  const KernelLaunch& kernel = op.kernel;
  for (const FlagValue& flag : kernel.waits) {
    submitFlag(stream, NodeKind::kWaitValue, flag, true, op);
  }
  Node node;
  node.site = op.site;
  node.name = kernel.name;
  if (op.kind == OpKind::kKernel) {
    node.kind = NodeKind::kKernel;
    node.reads = kernel.reads;
    node.writes = kernel.writes;
  } else {
    node.kind = op.kind == OpKind::kCopy ? NodeKind::kCopy : NodeKind::kFill;
    if (op.kind == OpKind::kCopy) node.reads = {{op.src, op.bytes}};
    node.writes = {{op.dst, op.bytes}};
  }
  const std::vector<FlagValue> signals = kernel.signals;
  Op marker;
  marker.site = op.site;
  marker.kernel.name = kernel.name;
  ops_.emplace(append(stream, std::move(node)), std::move(op));
  for (const FlagValue& flag : signals) {
    submitFlag(stream, NodeKind::kWriteValue, flag, true, marker);
  }
  stepSome();
}

NodeId Session::record(int stream, NodeId previous, Site site) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  Node node;
  node.kind = NodeKind::kRecord;
  node.site = site;
  node.record = previous;
  const NodeId id = append(stream, std::move(node));
  stepSome();
  return id;
}

void Session::waitEvent(int stream, NodeId record, Site site) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  Node node;
  node.kind = NodeKind::kWaitEvent;
  node.site = site;
  node.record = record;
  append(stream, std::move(node));
  stepSome();
}

bool Session::query(NodeId record) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  for (int i = static_cast<int>(random_() % 4); i > 0 && stepFor(kNoNode); --i) {
  }
  if (!executed(record)) return false;
  Node node;
  node.kind = NodeKind::kQuery;
  node.record = record;
  appendHost(std::move(node));
  return true;
}

void Session::synchronizeEvent(NodeId record, double timeout_s,
                               const DeviceApi::InterruptCheck& check, Site site) {
  std::unique_lock lock(mutex_);
  checkRunning();
  Node node;
  node.kind = NodeKind::kSynchronize;
  node.site = site;
  node.record = record;
  const NodeId waiting = appendHost(std::move(node));
  await(record, waiting, timeout_s, check, lock);
}

void Session::synchronizeStream(int stream, double timeout_s,
                                const DeviceApi::InterruptCheck& check, Site site) {
  std::unique_lock lock(mutex_);
  checkRunning();
  const auto& nodes = trace_.entities[static_cast<size_t>(stream)].nodes;
  Node node;
  node.kind = NodeKind::kSynchronize;
  node.site = site;
  node.target = nodes.empty() ? kNoNode : nodes.back();
  const NodeId target = node.target;
  const NodeId waiting = appendHost(std::move(node));
  await(target, waiting, timeout_s, check, lock);
}

void Session::allocated(void* memory, size_t bytes, Site site) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  std::memset(memory, kNewPoison, std::min(bytes, kPoisonBytes));
  Node node;
  node.kind = NodeKind::kAllocate;
  node.site = site;
  node.writes = {{memory, bytes}};
  appendHost(std::move(node));
}

void Session::freed(Mapping mapping, size_t bytes, Site site) {
  const std::lock_guard lock(mutex_);
  if (running_) {
    std::memset(mapping.data(), kFreedPoison, std::min(bytes, kPoisonBytes));
    Node node;
    node.kind = NodeKind::kFree;
    node.site = site;
    node.writes = {{mapping.data(), bytes}};
    appendHost(std::move(node));
  }
  freed_.push_back(std::move(mapping));
}

void Session::keepMapped(std::vector<Mapping> mappings) {
  const std::lock_guard lock(mutex_);
  for (Mapping& mapping : mappings) freed_.push_back(std::move(mapping));
}

void Session::touched(NodeKind kind, const void* data, size_t bytes, Site site) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  Node node;
  node.kind = kind;
  node.site = site;
  (kind == NodeKind::kHostRead ? node.reads : node.writes) = {{data, bytes}};
  const NodeId id = appendHost(std::move(node));
  if (kind == NodeKind::kHostWrite) noteOverwrittenFlags(id);
}

void Session::storeFlag(uint32_t* flag, uint32_t value, Site site) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  addFlag(flag);
  Node node;
  node.kind = NodeKind::kStoreFlag;
  node.site = site;
  node.flag = {flag, value};
  appendHost(std::move(node));
  storeWord(flag, value);
  changed_.notify_all();
}

void Session::ordered(NodeKind kind, uint64_t key) {
  const std::lock_guard lock(mutex_);
  checkRunning();
  Node node;
  node.kind = kind;
  const auto last = releases_.try_emplace(key, kNoNode).first;
  node.record = last->second;
  const NodeId id = appendHost(std::move(node));
  if (kind == NodeKind::kRelease) last->second = id;
}

}  // namespace hdpcomm::testing::check
