#include "testing/check/replay.hpp"

#include <algorithm>
#include <cstring>

#include "device/simulated/wait.hpp"

namespace hdpcomm::testing::check {

const char* nodeName(NodeKind kind) {
  switch (kind) {
    case NodeKind::kCopy:
      return "copy";
    case NodeKind::kFill:
      return "fill";
    case NodeKind::kKernel:
      return "launch";
    case NodeKind::kWriteValue:
      return "writeValue";
    case NodeKind::kWaitValue:
      return "waitValue";
    case NodeKind::kRecord:
      return "record";
    case NodeKind::kWaitEvent:
      return "wait";
    case NodeKind::kSynchronize:
      return "synchronize";
    case NodeKind::kQuery:
      return "query";
    case NodeKind::kAllocate:
      return "allocate";
    case NodeKind::kFree:
      return "free";
    case NodeKind::kHostRead:
      return "annotateRead";
    case NodeKind::kHostWrite:
      return "annotateWrite";
    case NodeKind::kHostFree:
      return "annotateFree";
    case NodeKind::kStoreFlag:
      return "storeFlag";
    case NodeKind::kRelease:
      return "annotateRelease";
    case NodeKind::kAcquire:
      break;
  }
  return "annotateAcquire";
}

bool sameSite(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

const char* orderingCall(const Node& node) {
  if (node.of_kernel) return node.kind == NodeKind::kWriteValue ? "kernel signal" : "kernel wait";
  return nodeName(node.kind);
}

bool isOrdering(const Node& node) {
  switch (node.kind) {
    case NodeKind::kRecord:
    case NodeKind::kWaitEvent:
    case NodeKind::kWriteValue:
    case NodeKind::kWaitValue:
    case NodeKind::kSynchronize:
      return true;
    default:
      return false;
  }
}

Replay::Replay(const Trace& trace, uint64_t seed, const std::optional<OrderingSite>& ignore)
    : trace_(trace),
      random_(seed),
      ignore_(ignore),
      next_(trace.entities.size()),
      clocks_(trace.nodes.size()),
      shadow_([this](NodeId earlier, NodeId later) { return ordered(earlier, later); }) {
  const auto none = std::make_shared<const Clock>(trace.entities.size());
  snapshots_.assign(trace.entities.size(), none);
  for (size_t i = 0; i < trace.entities.size(); ++i) order_.push_back(static_cast<int>(i));
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    return trace.entities[static_cast<size_t>(a)].key < trace.entities[static_cast<size_t>(b)].key;
  });
  for (const auto& [flag, value] : trace.flags) flags_[flag] = {{value, kNoNode}};
}

bool Replay::ordered(NodeId earlier, NodeId later) const {
  const Node& a = at(earlier);
  const Node& b = at(later);
  if (a.entity == b.entity) return a.position < b.position;
  return (*clocks_[static_cast<size_t>(later)])[static_cast<size_t>(a.entity)] > a.position;
}

bool Replay::ignored(const Node& node) const {
  return node.abandoned || (ignore_ && isOrdering(node) && ignore_->call == orderingCall(node) &&
                            sameSite(ignore_->site, node.site));
}

NodeId Replay::awaited(const Node& node) const {
  NodeId record = node.record;
  while (record != kNoNode && ignored(at(record))) record = at(record).record;
  return record == kNoNode ? node.target : record;
}

bool Replay::enabled(NodeId id) {
  const Node& node = at(id);
  if (!replayed(node.submitted)) return false;
  if (ignored(node)) return true;
  switch (node.kind) {
    case NodeKind::kWaitEvent:
    case NodeKind::kSynchronize:
    case NodeKind::kQuery:
      return replayed(awaited(node));
    case NodeKind::kWaitValue:
      return reached(flagValue(node.flag.flag), node.flag.value);
    case NodeKind::kAcquire:
      return node.record == kNoNode || releasesBefore(node.record) != nullptr;
    default:
      return true;
  }
}

uint32_t Replay::flagValue(const uint32_t* flag) const { return flags_.at(flag).back().value; }

void Replay::acquire(int entity, const Clock& from) {
  Snapshot& mine = snapshots_[static_cast<size_t>(entity)];
  const Clock& old = *mine;
  bool more = false;
  for (size_t i = 0; i < from.size() && !more; ++i) more = from[i] > old[i];
  if (!more) return;
  auto merged = std::make_shared<Clock>(old);
  for (size_t i = 0; i < from.size(); ++i) (*merged)[i] = std::max(old[i], from[i]);
  mine = std::move(merged);
}

void Replay::acquire(int entity, NodeId from) {
  if (from == kNoNode) return;
  const Node& node = at(from);
  Clock clock = *clocks_[static_cast<size_t>(from)];
  auto& own = clock[static_cast<size_t>(node.entity)];
  own = std::max(own, static_cast<uint32_t>(node.position + 1));
  acquire(entity, clock);
}

// The wait may have seen any of the latest writes that satisfy it, back to one that does not or to
// one that it is already ordered after. Returns the oldest of these.
NodeId Replay::writeSeenBy(NodeId wait) const {
  const Node& node = at(wait);
  const Clock& known = *snapshots_[static_cast<size_t>(node.entity)];
  NodeId found = kNoNode;
  const auto& writes = flags_.at(node.flag.flag);
  for (auto each = writes.rbegin(); each != writes.rend(); ++each) {
    if (!reached(each->value, node.flag.value)) break;
    found = each->node;
    if (found == kNoNode) break;
    const Node& writer = at(found);
    if (writer.entity == node.entity ||
        known[static_cast<size_t>(writer.entity)] > writer.position) {
      break;
    }
  }
  return found;
}

const Replay::Clock* Replay::releasesBefore(NodeId last) {
  std::vector<NodeId> chain;  // releases that are not in releases_ yet
  for (NodeId each = last; each != kNoNode && !releases_.contains(each); each = at(each).record) {
    if (!replayed(each)) return nullptr;
    chain.push_back(each);
  }
  for (auto each = chain.rbegin(); each != chain.rend(); ++each) {
    const Node& node = at(*each);
    Clock clock = *clocks_[static_cast<size_t>(*each)];
    clock[static_cast<size_t>(node.entity)] = static_cast<uint32_t>(node.position + 1);
    if (node.record != kNoNode) {
      const Clock& before = releases_.at(node.record);
      for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], before[i]);
    }
    releases_.emplace(*each, std::move(clock));
  }
  return &releases_.at(last);
}

void Replay::step(NodeId id) {
  const Node& node = at(id);
  if (node.host != node.entity) acquire(node.entity, node.submitted);
  clocks_[static_cast<size_t>(id)] = snapshots_[static_cast<size_t>(node.entity)];
  if (!ignored(node)) {
    // Before the wait takes effect: it must not order itself after a first value.
    findUnwritten(id);
    switch (node.kind) {
      case NodeKind::kWaitEvent:
      case NodeKind::kSynchronize:
      case NodeKind::kQuery:
        acquire(node.entity, awaited(node));
        break;
      case NodeKind::kWaitValue:
        acquire(node.entity, writeSeenBy(id));
        break;
      case NodeKind::kAcquire:
        if (node.record != kNoNode) acquire(node.entity, *releasesBefore(node.record));
        break;
      default:
        break;
    }
  }
  clocks_[static_cast<size_t>(id)] = snapshots_[static_cast<size_t>(node.entity)];
  if (ignored(node)) return;
  access(id);
  if (node.kind == NodeKind::kWriteValue || node.kind == NodeKind::kStoreFlag) {
    flags_[node.flag.flag].push_back({node.flag.value, id});
  }
  for (const auto& [flag, value] : node.overwritten) flags_[flag].push_back({value, id});
}

void Replay::findUnwritten(NodeId id) {
  const Node& node = at(id);
  std::vector<MemoryRange> reads = node.reads;
  if (node.kind == NodeKind::kWaitValue) reads.push_back({node.flag.flag, sizeof(uint32_t)});
  for (const MemoryRange& range : reads) {
    for (const Shadow::Bytes& bytes : shadow_.unwritten(range, id)) {
      unwritten_reads_.push_back({id, bytes});
    }
  }
}

void Replay::access(NodeId id) {
  const Node& node = at(id);
  switch (node.kind) {
    case NodeKind::kAllocate:
      blocks_[static_cast<const std::byte*>(node.writes[0].data)] = id;
      return shadow_.allocate(node.writes[0]);
    case NodeKind::kFree:
      touch(id, node.writes[0], AccessKind::kFree);
      return shadow_.free(node.writes[0], id);
    case NodeKind::kHostFree:
      return touch(id, node.writes[0], AccessKind::kFree);
    case NodeKind::kWriteValue:
    case NodeKind::kStoreFlag:
      return touch(id, {node.flag.flag, sizeof(uint32_t)}, AccessKind::kFlagWrite);
    case NodeKind::kWaitValue:
      return touch(id, {node.flag.flag, sizeof(uint32_t)}, AccessKind::kFlagRead);
    default:
      for (const MemoryRange& range : node.reads) touch(id, range, AccessKind::kRead);
      for (const MemoryRange& range : node.writes) touch(id, range, AccessKind::kWrite);
  }
}

std::vector<CheckReport> Replay::run() {
  std::vector<int> ready;
  for (;;) {
    ready.clear();
    for (const int entity : order_) {
      const auto& nodes = trace_.entities[static_cast<size_t>(entity)].nodes;
      const size_t next = next_[static_cast<size_t>(entity)];
      if (next < nodes.size() && enabled(nodes[next])) ready.push_back(entity);
    }
    if (ready.empty()) break;
    const int entity = ready[random_() % ready.size()];
    size_t& next = next_[static_cast<size_t>(entity)];
    step(trace_.entities[static_cast<size_t>(entity)].nodes[next++]);
  }
  reportDeadlocks();
  reportNeverWritten();
  const auto key = [](const CheckReport& r) {
    return std::tie(r.kind, r.first.who, r.second.who, r.first.site.line, r.second.site.line);
  };
  std::stable_sort(reports_.begin(), reports_.end(),
                   [&](const CheckReport& a, const CheckReport& b) { return key(a) < key(b); });
  return reports_;
}

}  // namespace hdpcomm::testing::check
