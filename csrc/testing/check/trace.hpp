// The record of a check: the operations of every stream and host thread in their order, and what
// orders operations of different ones.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device/device_api.hpp"
#include "device/simulated/op.hpp"

namespace hdpcomm::testing::check {

using namespace simulated;  // the operations that are checked

using NodeId = int64_t;
inline constexpr NodeId kNoNode = -1;

enum class NodeKind : uint8_t {
  // of streams
  kCopy,
  kFill,
  kKernel,
  kWriteValue,
  kWaitValue,
  kRecord,
  kWaitEvent,
  // of host threads
  kSynchronize,
  kQuery,
  kAllocate,
  kFree,
  kHostRead,
  kHostWrite,
  kHostFree,
  kStoreFlag,
  kRelease,
  kAcquire,
};

struct Node {
  NodeKind kind = NodeKind::kCopy;
  bool of_kernel = false;  // kWriteValue and kWaitValue that are part of a kernel
  bool abandoned = false;  // a synchronize that timed out: it orders nothing
  const char* name = "";   // of a kernel
  Site site;
  int entity = 0;
  size_t position = 0;         // in its entity
  NodeId submitted = kNoNode;  // last node of the submitting host thread before this one
  int host = 0;                // the submitting host thread, or the entity itself
  // kRecord: the previous record of the same event. kWaitEvent, and synchronize and query of an
  // event: the record that it refers to. kRelease, kAcquire: the previous release of the same key.
  NodeId record = kNoNode;
  // Synchronize of a stream: the stream's last node.
  NodeId target = kNoNode;
  FlagValue flag;  // flag operations
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;  // kAllocate, kFree, kHostFree: the memory
  // Flags that a plain write has overwritten, with their values after it.
  std::vector<std::pair<const uint32_t*, uint32_t>> overwritten;
};

// A stream or a host thread.
struct Entity {
  std::string name;
  // Sorts entities independently of which host thread came first: {0, rank, n} for a host thread,
  // {1, device, n-th stream} for a stream.
  std::vector<int64_t> key;
  std::vector<NodeId> nodes;
};

struct Trace {
  std::deque<Node> nodes;
  std::deque<Entity> entities;
  std::map<const uint32_t*, uint32_t> flags;  // with their values when they were first used
};

const char* nodeName(NodeKind kind);

}  // namespace hdpcomm::testing::check
