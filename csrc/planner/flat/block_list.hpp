// Blocks of ranks by the time at which they become free. The packer looks at many neighbours of a
// place for each job, so blocks lie in chunks that are read from front to back, not in a tree.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace hdpcomm::planner {

// Neighbouring ranks that become free at the same time.
struct Block {
  double ready = 0;
  int first = 0;
  int count = 0;
  double speed = 1;    // of all of its ranks
  uint32_t order = 0;  // of its insertion
};

// Sorted by ready time, equal ones in the order of their insertion. A change makes iterators
// invalid. No chunk is empty.
class BlockList {
 public:
  class Iterator {
   public:
    Iterator() = default;
    const Block& operator*() const { return list_->chunks_[chunk_]->items[item_]; }
    const Block* operator->() const { return &**this; }
    Iterator& operator++() {
      if (++item_ == list_->chunks_[chunk_]->count) {
        ++chunk_;
        item_ = 0;
      }
      return *this;
    }
    Iterator& operator--() {
      if (item_ == 0) item_ = list_->chunks_[--chunk_]->count;
      --item_;
      return *this;
    }
    bool operator==(const Iterator& other) const {
      return chunk_ == other.chunk_ && item_ == other.item_;
    }

   private:
    friend class BlockList;
    Iterator(const BlockList* list, size_t chunk, int item)
        : list_(list), chunk_(chunk), item_(item) {}

    const BlockList* list_;  // not set where there is no place yet
    size_t chunk_;
    int item_;
  };

  Iterator begin() const { return {this, 0, 0}; }
  Iterator end() const { return {this, chunks_.size(), 0}; }

  // The first block that becomes free after `ready`.
  Iterator upperBound(double ready) const;

  void insert(const Block& block);

  // Returns the place of the next block.
  Iterator erase(Iterator at);

  // Puts a block that is free at the same time in the place of this one: where it would come after
  // an erase() and an insert(). False, and nothing is changed, if that is another place.
  bool replace(Iterator at, const Block& block);

  // The place of a block that is there.
  Iterator find(const Block& block) const;

  // Goes on, or back, to the next block of at least `ranks` ranks. False if there is none before
  // `end`, or none among as many blocks as `probes` says, from which this takes those that it
  // passed.
  bool stepTo(Iterator& at, const Iterator& end, int ranks, int& probes) const;
  bool stepBackTo(Iterator& at, int ranks, int& probes) const;

  void clear();

 private:
  static constexpr int kMost = 64;  // blocks of a chunk

  // Its blocks lie anywhere in `room`, so that the shorter part of them moves.
  struct Chunk {
    Block* items = nullptr;
    int count = 0;
    int widest = 0;         // ranks, which no block of it has more of
    bool narrower = false;  // maybe no block has as many
    std::array<Block, kMost> room;
  };

  static int placeIn(const Chunk& chunk, double ready);

  // Whether a block may have so many ranks.
  static bool hasRanks(Chunk& chunk, int ranks);

  Chunk& addChunk(size_t at);

  // Moves the later half of a full chunk into a new one behind it.
  void split(size_t which);

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<double> last_ready_;             // of each chunk's last block
  std::vector<std::unique_ptr<Chunk>> spare_;  // emptied, for new ones
};

}  // namespace hdpcomm::planner
