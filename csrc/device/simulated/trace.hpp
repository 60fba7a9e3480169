// What a check writes down: the operations of every stream and host thread, in the order of each,
// and what orders them across.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "device/device_api.hpp"
#include "device/simulated/op.hpp"

namespace hdpcomm::sim {

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
  kLoadFlag,
  kRelease,
  kAcquire,
};

struct Node {
  NodeKind kind = NodeKind::kCopy;
  bool of_kernel = false;  // kWriteValue and kWaitValue that a kernel does itself
  bool abandoned = false;  // a synchronize that timed out: it orders nothing
  const char* name = "";   // of a kernel
  Site site;
  int entity = 0;
  size_t position = 0;         // in its entity
  NodeId submitted = kNoNode;  // last node of the submitting host thread before this one
  int host = 0;                // the submitting host thread, or the entity itself
  // kRecord: the record of the same event before it. kWaitEvent and the synchronize and query of an
  // event: the record that it looks at. kRelease, kAcquire: the release of the same key before it.
  NodeId record = kNoNode;
  // Synchronize of a stream: the stream's last node. kLoadFlag: the write that it saw.
  NodeId target = kNoNode;
  FlagValue flag;  // flag operations; kLoadFlag: the value that was read
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;  // kAllocate, kFree, kHostFree: the memory
  // Flags that a plain write went over, with what they held after it.
  std::vector<std::pair<const uint32_t*, uint32_t>> overwritten;
};

// A stream or a host thread.
struct Entity {
  std::string name;
  // Gives entities an order that does not depend on which host thread came first: {0, rank, n} of a
  // host thread, {1, device, n-th stream} of a stream.
  std::vector<int64_t> key;
  std::vector<NodeId> nodes;
};

struct Trace {
  std::deque<Node> nodes;
  std::deque<Entity> entities;
  std::map<const uint32_t*, uint32_t> flags;  // with what they held when they were first named
};

const char* nodeName(NodeKind kind);

}  // namespace hdpcomm::sim
