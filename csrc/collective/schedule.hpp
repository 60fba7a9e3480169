// A collective as data: what one rank sends, receives, reduces and moves, step by step.
//
// Schedules are pure functions of (operation, algorithm, group size, rank, sizes). They know no
// transport, no memory and no global ranks, so tests can check and simulate them. All transfers of
// a step are posted together; a step ends when they have ended. Offsets and lengths are bytes; a
// span never splits an element.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/call.hpp"

namespace hdpcomm {

// The algorithm of this name. Throws InvalidUsage for an unknown name, listing the known ones.
Algorithm parseAlgorithm(const std::string& name);

enum class Buffer : uint8_t { kIn, kOut, kTemp };

struct Span {
  Buffer buffer = Buffer::kIn;
  size_t offset = 0;
  size_t bytes = 0;
  bool operator==(const Span&) const = default;
};

struct Send {
  int peer = 0;  // group rank
  Span from;
  // May be in flight until the end of the schedule; the algorithm never writes its span before the
  // peer has received it. Otherwise the step ends only when the peer has received it.
  bool deferred = false;
  bool confirm = false;  // set by makeSchedule(): no message from the peer follows (confirmUnheard)
};

struct Recv {
  int peer = 0;
  Span to;
  bool reduce = false;  // to = operand op message, else to = message
  Span operand = {};
};

enum class MoveKind : uint8_t { kCopy, kReduce, kDivide };  // kDivide: to = to / group size (avg)

struct Move {
  MoveKind kind = MoveKind::kCopy;
  Span from;
  Span to;  // kReduce: to = to op from
};

struct Step {
  std::vector<Move> moves;  // run first, in order
  std::vector<Send> sends;  // then run together with the receives; in this order per peer
  std::vector<Recv> recvs;
};

struct Schedule {
  OpCode op = OpCode::kBarrier;
  Algorithm algorithm = Algorithm::kRing;
  int group_size = 1;
  int rank = 0;
  size_t temp_bytes = 0;
  std::vector<Step> steps;
};

// What a schedule is made for. `count` is the number of elements of one block (all_gather,
// reduce_scatter, gather, scatter, all_to_all) or of the whole buffer (all_reduce, broadcast,
// reduce). Ragged all_to_all gives counts for each peer instead.
struct ScheduleRequest {
  OpCode op = OpCode::kBarrier;
  Algorithm algorithm = Algorithm::kAuto;
  int group_size = 1;
  int rank = 0;
  size_t count = 0;
  size_t element_bytes = 1;
  int root = -1;
  bool average = false;
  std::vector<size_t> in_counts;   // ragged all_to_all: elements for each peer
  std::vector<size_t> out_counts;  // ... and from each
  // The node of each group rank, numbered by first appearance; empty: all share one. Used only by
  // kHierarchical and the costs.
  std::vector<int> nodes;

  bool operator==(const ScheduleRequest&) const = default;
};

// Throws InvalidUsage for an algorithm that the operation does not have, listing those it has.
Schedule makeSchedule(const ScheduleRequest& request);
// The algorithms of an operation; the first is the default.
const std::vector<Algorithm>& algorithmsOf(OpCode op);

}  // namespace hdpcomm
