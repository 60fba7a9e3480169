// The texts of a replay's reports.
#include <cstdlib>

#include "testing/check/replay.hpp"

namespace hdpcomm::testing::check {
namespace {

const char* verb(AccessKind kind) {
  switch (kind) {
    case AccessKind::kRead:
      return "reads";
    case AccessKind::kWrite:
      return "writes";
    case AccessKind::kFlagRead:
      return "reads the flag";
    case AccessKind::kFlagWrite:
      return "sets the flag";
    case AccessKind::kFree:
      break;
  }
  return "frees";
}

std::string sentence(const CheckedOp& op) {
  return op.what + " at " + placeOf(op.site) + " (" + op.who + ")";
}

}  // namespace

CheckedOp Replay::describe(NodeId id, const char* how) const {
  const Node& node = at(id);
  std::string what = nodeName(node.kind);
  if (node.name[0] != '\0') what += std::string(" of ") + node.name;
  if (node.of_kernel) what = std::string(orderingCall(node)) + what.substr(what.find(" of "));
  if (how[0] != '\0') what += std::string(" (") + how + ")";
  return {what, trace_.entities[static_cast<size_t>(node.entity)].name, node.site};
}

std::string Replay::place(const std::byte* begin, const std::byte* end) const {
  auto next = blocks_.upper_bound(begin);
  if (next != blocks_.begin()) {
    const Node& block = at(std::prev(next)->second);
    const auto* base = static_cast<const std::byte*>(block.writes[0].data);
    if (begin < base + block.writes[0].bytes) {
      return "bytes " + std::to_string(begin - base) + " to " + std::to_string(end - base) +
             " of the block that was allocated at " + placeOf(block.site);
    }
  }
  return std::to_string(end - begin) + " bytes at " + hexOf(begin);
}

void Replay::add(std::string kind, const CheckedOp& first, const CheckedOp& second,
                 std::string text) {
  // The same two lines in either order are one finding.
  const auto a = std::make_pair(std::string(first.site.file), first.site.line);
  const auto b = std::make_pair(std::string(second.site.file), second.site.line);
  const auto& [low, high] = std::minmax(a, b);
  const bool race = kind == "missing wait" || kind == "reused too early";
  if (!seen_.emplace(race ? "race" : kind, low.first, low.second, high.first, high.second).second) {
    return;
  }
  reports_.push_back({std::move(kind), first, second, std::move(text)});
}

void Replay::touch(NodeId id, const MemoryRange& range, AccessKind kind) {
  for (const Shadow::Conflict& conflict : shadow_.access(range, {id, kind})) {
    NodeId first = conflict.earlier.node;
    NodeId second = id;
    AccessKind first_kind = conflict.earlier.kind;
    AccessKind second_kind = kind;
    // For two operations of one host thread, program order shows which was meant to be first.
    if (at(first).host == at(second).host && first > second) {
      std::swap(first, second);
      std::swap(first_kind, second_kind);
    }
    raced_.insert(first);
    raced_.insert(second);
    const CheckedOp a = describe(first, verb(first_kind));
    const CheckedOp b = describe(second, verb(second_kind));
    const std::string memory = place(conflict.begin, conflict.end);
    const std::string both = sentence(a) + " and " + sentence(b);
    if (first_kind == AccessKind::kFree || second_kind == AccessKind::kFree) {
      add("use after free", a, b,
          both + " touch " + memory + ": nothing makes the free come after the use");
    } else if (second_kind == AccessKind::kRead || second_kind == AccessKind::kFlagRead) {
      add("missing wait", a, b,
          both + " touch " + memory + ", and nothing makes the second wait for the first");
    } else {
      add("reused too early", a, b,
          both + " touch " + memory + ", and nothing keeps the second from overwriting it early");
    }
  }
}

void Replay::reportNeverWritten() {
  for (const UnwrittenRead& read : unwritten_reads_) {
    if (raced_.contains(read.node)) continue;  // the report of the race says more
    const CheckedOp reader = describe(read.node, "reads");
    const auto block = std::prev(blocks_.upper_bound(read.bytes.begin));
    const CheckedOp maker = describe(block->second, "");
    add("never written", maker, reader,
        sentence(reader) + " reads " + place(read.bytes.begin, read.bytes.end) +
            ", which nothing has written");
  }
}

void Replay::reportDeadlocks() {
  for (const int entity : order_) {
    const auto& nodes = trace_.entities[static_cast<size_t>(entity)].nodes;
    const size_t next = next_[static_cast<size_t>(entity)];
    if (next >= nodes.size()) continue;
    const Node& node = at(nodes[next]);
    if (node.kind != NodeKind::kWaitValue || !replayed(node.submitted)) continue;
    // An unwritten flag is reported as such: that explains more than the wait for it.
    acquire(entity, node.submitted);
    clocks_[static_cast<size_t>(nodes[next])] = snapshots_[static_cast<size_t>(entity)];
    const size_t before = unwritten_reads_.size();
    findUnwritten(nodes[next]);
    if (unwritten_reads_.size() > before) continue;
    const CheckedOp waiter = describe(nodes[next], "");
    const FlagWrite last = flags_.at(node.flag.flag).back();
    CheckedOp other{"nobody", "", node.site};
    std::string text = sentence(waiter) + " waits for " + std::to_string(node.flag.value) +
                       " or more in " +
                       place(reinterpret_cast<const std::byte*>(node.flag.flag),
                             reinterpret_cast<const std::byte*>(node.flag.flag + 1)) +
                       ", which holds " + std::to_string(last.value);
    if (last.node != kNoNode) {
      other = describe(last.node, "");
      text += " since " + sentence(other);
    } else {
      text += " and which nothing wrote";
    }
    add("deadlock", waiter, other, text + "; no operation is left that could run");
  }
}

}  // namespace hdpcomm::testing::check
