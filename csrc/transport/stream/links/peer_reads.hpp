// Collectives whose kernels read and write the peers' memory where it lies: one-shot and two-shot
// all-reduce, one-shot all-gather and reduce-scatter, on any subset of a device world.
//
// A rank publishes its operand in its window (or leaves it where it is, in the landing zone); the
// ranks meet; each runs one kernel over all operands; the ranks meet again, and the windows are
// free. What does not fit a window goes in pieces, one after another.
//
//   all-gather, one shot      every rank reads the blocks of all
//   reduce-scatter, one shot  rank r reads block r of all
//   all-reduce, one shot      every rank reads all of all
//   all-reduce, two shots     rank r reads part r of all and writes the result to all windows
//
// Sums go over the group's ranks in order, rank 0's operand first, in fp32 for 16-bit floats and
// rounded once, whatever the rank: all ranks hold the same bits.
//
// A meeting is a flag for each pair and direction, 0 or 1 as those of messages: written by one
// side, awaited and set back by the other. There are two, so that the flag of the next meeting
// never overtakes that of the last. Everything runs on one lane of the rank, in the order of
// submission: operations of different streams share the window.
#pragma once

#include <optional>
#include <vector>

#include "base/call.hpp"
#include "transport/stream/links/link.hpp"

namespace hdpcomm::device {

class PeerReads {
 public:
  struct Operation {
    Call call;
    const std::vector<int>* ranks = nullptr;  // places in the arenas, in the group's order
    const std::byte* in = nullptr;
    std::byte* out = nullptr;
  };

  PeerReads(DevicePtr device, const Arena& arena, int rank);

  // Where the peers find the operand, as an offset in this rank's landing zone, the same on all
  // ranks; none: in the window. An operand in the zone is read there, unless the peers' kernels
  // would read what this rank's kernel overwrites.
  std::optional<uint64_t> placeOf(const Operation& operation) const;
  // Bytes that kernels move from this rank's memory to that of a peer, and as many back.
  size_t bytesWith(const Operation& operation, int group_rank) const;

  using WaitCheck = Pacer::WaitCheck;

  // On the lane, which is lane(), and has been forked.
  void run(const Operation& operation, Lane& lane, const WaitCheck& check);
  Lane& lane();  // made on first use
  void addStreams(std::vector<Stream>& streams) const {
    if (lane_) streams.push_back(lane_->stream());
  }
  // Sets every flag that this rank's streams may wait for in meetings, once.
  void release(Stream stream) const;

 private:
  class Group;  // an operation and what follows from it
  void gather(const Group& group, Lane& lane, const WaitCheck& check);
  void reduceScatter(const Group& group, Lane& lane, const WaitCheck& check);
  void reduceOnce(const Group& group, Lane& lane, const WaitCheck& check);
  void reduceTwice(const Group& group, Lane& lane, const WaitCheck& check);
  static size_t operationsOf(const Group& group);
  // Copies to `to + at` from `from + at`.
  void copyPart(std::byte* to, const std::byte* from, size_t at, size_t bytes, Stream stream,
                Site site = std::source_location::current());
  void meet(const Group& group, uint32_t PairFlags::* flag, Stream stream);

  DevicePtr device_;
  const Arena& arena_;
  int rank_;
  std::optional<Lane> lane_;
  std::vector<int> met_;  // the peers so far
};

}  // namespace hdpcomm::device
