// Which operations accessed which bytes, for the replay of a check.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "testing/check/trace.hpp"

namespace hdpcomm::testing::check {

enum class AccessKind : uint8_t { kRead, kWrite, kFlagRead, kFlagWrite, kFree };

struct Access {
  NodeId node = kNoNode;
  AccessKind kind = AccessKind::kRead;
};

// Keeps, for every byte, the accesses that a later one may conflict with. If there are many, an
// access is dropped when a later one, ordered after it, conflicts with everything that it conflicts
// with: whatever is not ordered with the dropped access is not ordered with the later one either.
// So a race is always reported, whatever the order of the replay.
class Shadow {
 public:
  // Whether `earlier`, which was replayed before, is ordered before `later`.
  using Ordered = std::function<bool(NodeId earlier, NodeId later)>;
  struct Conflict {
    Access earlier;
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
  };
  struct Bytes {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
  };

  explicit Shadow(Ordered ordered) : ordered_(std::move(ordered)) {}
  // Marks memory as new: nothing has accessed it.
  void allocate(const MemoryRange& range);
  // Marks memory as freed: every later access is a use after free.
  void free(const MemoryRange& range, NodeId node);
  // Adds an access, and returns what it conflicts with.
  std::vector<Conflict> access(const MemoryRange& range, const Access& access);
  // The bytes of these, in allocated memory, that no write ordered before the node has written.
  std::vector<Bytes> unwritten(const MemoryRange& range, NodeId node);

 private:
  struct Segment {
    const std::byte* end = nullptr;
    bool allocated = false;
    bool freed = false;
    std::vector<NodeId> first_writes;  // writes that no other write is ordered before
    std::vector<Access> accesses;
  };
  using Segments = std::map<const std::byte*, Segment>;

  void split(const std::byte* at);
  // The segments of exactly these bytes, created where there are none.
  std::pair<Segments::iterator, Segments::iterator> cover(const std::byte* begin,
                                                          const std::byte* end);
  void add(Segment& segment, const Access& access) const;

  Ordered ordered_;
  Segments segments_;
};

}  // namespace hdpcomm::testing::check
