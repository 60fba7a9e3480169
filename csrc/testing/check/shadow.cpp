#include "testing/check/shadow.hpp"

#include <algorithm>

namespace hdpcomm::testing::check {
namespace {

constexpr size_t kManyAccesses = 32;

bool writes(AccessKind kind) { return kind != AccessKind::kRead && kind != AccessKind::kFlagRead; }

bool accessesFlag(AccessKind kind) {
  return kind == AccessKind::kFlagRead || kind == AccessKind::kFlagWrite;
}

bool conflict(AccessKind a, AccessKind b) {
  return (writes(a) || writes(b)) && !(accessesFlag(a) && accessesFlag(b));
}

// Whether every access that conflicts with `earlier` conflicts with `later`, too.
bool covers(AccessKind later, AccessKind earlier) {
  for (const AccessKind other : {AccessKind::kRead, AccessKind::kWrite, AccessKind::kFlagRead,
                                 AccessKind::kFlagWrite, AccessKind::kFree}) {
    if (conflict(earlier, other) && !conflict(later, other)) return false;
  }
  return true;
}

const std::byte* begin(const MemoryRange& range) {
  return static_cast<const std::byte*>(range.data);
}
const std::byte* end(const MemoryRange& range) { return begin(range) + range.bytes; }

}  // namespace

void Shadow::split(const std::byte* at) {
  auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return;
  const auto found = std::prev(next);
  if (found->first == at || found->second.end <= at) return;
  Segment right = found->second;
  found->second.end = at;
  segments_.emplace(at, std::move(right));
}

std::pair<Shadow::Segments::iterator, Shadow::Segments::iterator> Shadow::cover(
    const std::byte* begin, const std::byte* end) {
  split(begin);
  split(end);
  auto found = segments_.lower_bound(begin);
  for (const std::byte* at = begin; at < end; ++found) {
    if (found == segments_.end() || found->first > at) {
      const std::byte* until = found == segments_.end() ? end : std::min(end, found->first);
      Segment segment;
      segment.end = until;
      found = segments_.emplace_hint(found, at, std::move(segment));
    }
    at = found->second.end;
  }
  return {segments_.lower_bound(begin), segments_.lower_bound(end)};
}

void Shadow::allocate(const MemoryRange& range) {
  const auto [first, last] = cover(begin(range), end(range));
  segments_.erase(first, last);
  Segment segment;
  segment.end = end(range);
  segment.allocated = true;
  segments_.emplace(begin(range), std::move(segment));
}

void Shadow::free(const MemoryRange& range, NodeId node) {
  const auto [first, last] = cover(begin(range), end(range));
  for (auto each = first; each != last; ++each) {
    each->second.freed = true;
    each->second.allocated = false;
    each->second.accesses = {{node, AccessKind::kFree}};
  }
}

void Shadow::add(Segment& segment, const Access& access) const {
  if (segment.accesses.size() >= kManyAccesses) {
    std::erase_if(segment.accesses, [&](const Access& earlier) {
      return covers(access.kind, earlier.kind) &&
             (earlier.node == access.node || ordered_(earlier.node, access.node));
    });
  }
  segment.accesses.push_back(access);
  if (!segment.allocated || !writes(access.kind)) return;
  const bool later = std::any_of(segment.first_writes.begin(), segment.first_writes.end(),
                                 [&](NodeId first) { return ordered_(first, access.node); });
  if (!later) segment.first_writes.push_back(access.node);
}

std::vector<Shadow::Bytes> Shadow::unwritten(const MemoryRange& range, NodeId node) {
  std::vector<Bytes> found;
  if (range.bytes == 0) return found;
  const auto [first, last] = cover(begin(range), end(range));
  for (auto each = first; each != last; ++each) {
    const Segment& segment = each->second;
    const bool written = std::any_of(segment.first_writes.begin(), segment.first_writes.end(),
                                     [&](NodeId write) { return ordered_(write, node); });
    if (segment.allocated && !written) found.push_back({each->first, segment.end});
  }
  return found;
}

std::vector<Shadow::Conflict> Shadow::access(const MemoryRange& range, const Access& access) {
  std::vector<Conflict> found;
  if (range.bytes == 0) return found;
  const auto [first, last] = cover(begin(range), end(range));
  for (auto each = first; each != last; ++each) {
    Segment& segment = each->second;
    for (const Access& earlier : segment.accesses) {
      if (earlier.node == access.node || !conflict(earlier.kind, access.kind)) continue;
      if (segment.freed || !ordered_(earlier.node, access.node)) {
        found.push_back({earlier, each->first, segment.end});
      }
    }
    if (segment.freed) continue;  // an access after the free is reported, but not remembered
    add(segment, access);
  }
  return found;
}

}  // namespace hdpcomm::testing::check
