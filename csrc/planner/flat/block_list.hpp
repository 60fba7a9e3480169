// Blocks of ranks by the time at which they become free.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <set>

namespace hdpcomm::planner {

// Neighbouring ranks that become free at the same time.
struct Block {
  double ready = 0;
  int first = 0;
  int count = 0;
  double speed = 1;    // of all of its ranks
  uint32_t order = 0;  // of its insertion

  bool operator<(const Block& other) const {
    return ready != other.ready ? ready < other.ready : order < other.order;
  }
};

// Sorted by ready time, equal ones in the order of their insertion.
class BlockList {
 public:
  using Iterator = std::set<Block>::const_iterator;

  Iterator begin() const { return blocks_.begin(); }
  Iterator end() const { return blocks_.end(); }
  // The first block that becomes free after `ready`.
  Iterator upperBound(double ready) const {
    Block last;
    last.ready = ready;
    last.order = std::numeric_limits<uint32_t>::max();
    return blocks_.upper_bound(last);
  }
  // The place of a block that is there.
  Iterator find(const Block& block) const { return blocks_.find(block); }

  void insert(const Block& block) {
    blocks_.insert(block);
    ++widths_[block.count];
  }
  // Returns the place of the next block.
  Iterator erase(Iterator at) {
    const auto width = widths_.find(at->count);
    if (--width->second == 0) widths_.erase(width);
    return blocks_.erase(at);
  }
  void clear() {
    blocks_.clear();
    widths_.clear();
  }

  // Goes on, or back, to the next block of at least `ranks` ranks. False if there is none before
  // `end`, or none among as many blocks as `probes` says, from which this takes those that it
  // passed.
  bool stepTo(Iterator& at, const Iterator& end, int ranks, int& probes) const {
    for (; probes > 0 && at != end && anyHas(ranks); ++at, --probes) {
      if (at->count >= ranks) return true;
    }
    return false;
  }
  bool stepBackTo(Iterator& at, int ranks, int& probes) const {
    for (; probes > 0 && at != begin() && anyHas(ranks); --probes) {
      if ((--at)->count >= ranks) return true;
    }
    return false;
  }

 private:
  bool anyHas(int ranks) const { return !widths_.empty() && widths_.rbegin()->first >= ranks; }

  std::set<Block> blocks_;
  std::map<int, int> widths_;  // how many blocks have so many ranks
};

}  // namespace hdpcomm::planner
