// One function per algorithm, each appending the steps of one rank; schedule.cpp lists them.
#pragma once

#include <cstddef>
#include <vector>

#include "collective/schedule.hpp"

namespace hdpcomm::collective {

// A schedule under construction, with shorthands: p ranks, this one is r.
class Builder {
 public:
  explicit Builder(const ScheduleRequest& request);

  int p() const { return schedule.group_size; }
  int r() const { return schedule.rank; }
  int mod(int rank) const { return ((rank % p()) + p()) % p(); }
  // The bytes of `count` elements.
  size_t bytes(size_t count) const { return count * request.element_bytes; }
  // Block i of a buffer of request.count elements cut in p nearly equal parts.
  Span part(Buffer buffer, int i) const;
  Span whole(Buffer buffer) const { return {buffer, 0, bytes(request.count)}; }
  // Block i of a buffer of p blocks of request.count elements.
  Span block(Buffer buffer, int i) const {
    return {buffer, bytes(request.count) * static_cast<size_t>(i), bytes(request.count)};
  }

  Step& step() { return schedule.steps.emplace_back(); }
  void move(Span from, Span to) { pending_moves().push_back({MoveKind::kCopy, from, to}); }
  // Divides by the group size when the operation averages.
  void divide(Span to) {
    if (request.average) pending_moves().push_back({MoveKind::kDivide, to, to});
  }

  const ScheduleRequest& request;
  Schedule schedule;

 private:
  std::vector<Move>& pending_moves() { return step().moves; }
};

// The largest power of two up to p.
int powerOfTwoBelow(int p);

void ringAllGather(Builder& b);
void directAllGather(Builder& b);
void bruckAllGather(Builder& b);
void ringReduceScatter(Builder& b);
void recursiveReduceScatter(Builder& b);
void directReduceScatter(Builder& b);
void ringAllReduce(Builder& b);
void directAllReduce(Builder& b);
void recursiveAllReduce(Builder& b);
void rabenseifnerAllReduce(Builder& b);
void binomialBroadcast(Builder& b);
void chainBroadcast(Builder& b);
void chainReduce(Builder& b);
void binomialGather(Builder& b);
void binomialScatter(Builder& b);
void bruckAllToAll(Builder& b);
void directBroadcast(Builder& b);
void binomialReduce(Builder& b);
void directReduce(Builder& b);
void directGather(Builder& b);
void directScatter(Builder& b);
void directAllToAll(Builder& b);
void disseminationBarrier(Builder& b);
void hierarchicalAllGather(Builder& b);
void hierarchicalReduceScatter(Builder& b);
void hierarchicalAllReduce(Builder& b);
void hierarchicalBroadcast(Builder& b);
void hierarchicalReduce(Builder& b);

}  // namespace hdpcomm::collective
