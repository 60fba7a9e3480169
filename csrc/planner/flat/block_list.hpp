// Blocks of ranks by the time at which they become free. The packer looks at many neighbours of a
// place for each job, so blocks lie in chunks that are read from front to back, not in a tree.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

namespace hdpcomm::planner {

// Neighbouring ranks that become free at the same time.
struct Block {
  double ready = 0;
  int first = 0;
  int count = 0;
  double speed = 1;  // of all of its ranks
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
  Iterator upperBound(double ready) const {
    const auto last = std::upper_bound(last_ready_.begin(), last_ready_.end(), ready);
    if (last == last_ready_.end()) return end();
    const auto chunk = static_cast<size_t>(last - last_ready_.begin());
    return {this, chunk, placeIn(*chunks_[chunk], ready)};
  }

  void insert(const Block& block) {
    if (chunks_.empty()) addChunk(0);
    const auto last = std::upper_bound(last_ready_.begin(), last_ready_.end(), block.ready);
    auto which = static_cast<size_t>(last - last_ready_.begin());
    if (which == chunks_.size()) --which;
    if (chunks_[which]->count == kMost) {
      split(which);
      if (block.ready >= last_ready_[which]) ++which;
    }
    Chunk& chunk = *chunks_[which];
    const int at = placeIn(chunk, block.ready);
    const bool room_before = chunk.items > chunk.room.data();
    const bool room_behind = chunk.items + chunk.count < chunk.room.data() + kMost;
    if (room_before && (2 * at < chunk.count || !room_behind)) {
      std::copy(chunk.items, chunk.items + at, chunk.items - 1);
      --chunk.items;
    } else {
      std::copy_backward(chunk.items + at, chunk.items + chunk.count,
                         chunk.items + chunk.count + 1);
    }
    chunk.items[at] = block;
    ++chunk.count;
    chunk.widest = std::max(chunk.widest, block.count);
    last_ready_[which] = chunk.items[chunk.count - 1].ready;
  }

  // Returns the place of the next block.
  Iterator erase(Iterator at) {
    Chunk& chunk = *chunks_[at.chunk_];
    Block* const place = chunk.items + at.item_;
    chunk.narrower |= place->count == chunk.widest;
    if (2 * at.item_ < chunk.count) {
      std::copy_backward(chunk.items, place, place + 1);
      ++chunk.items;
    } else {
      std::copy(place + 1, chunk.items + chunk.count, place);
    }
    --chunk.count;
    if (chunk.count == 0) {
      spare_.push_back(std::move(chunks_[at.chunk_]));
      chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(at.chunk_));
      last_ready_.erase(last_ready_.begin() + static_cast<std::ptrdiff_t>(at.chunk_));
      return {this, at.chunk_, 0};
    }
    last_ready_[at.chunk_] = chunk.items[chunk.count - 1].ready;
    if (at.item_ == chunk.count) return {this, at.chunk_ + 1, 0};
    return at;
  }

  // Puts a block that is free at the same time in the place of this one: where it would come after
  // an erase() and an insert(). False, and nothing is changed, if that is another place.
  bool replace(Iterator at, const Block& block) {
    Chunk& chunk = *chunks_[at.chunk_];
    Block& place = chunk.items[at.item_];
    Iterator next = at;
    if (!(++next == end()) && next->ready == place.ready) return false;
    chunk.narrower |= place.count == chunk.widest;
    place = block;
    chunk.widest = std::max(chunk.widest, block.count);
    return true;
  }

  // Goes on, or back, to the next block of at least `ranks` ranks. False if there is none before
  // `end`, or none among as many blocks as `probes` says, from which this takes those that it
  // passed.
  bool stepTo(Iterator& at, const Iterator& end, int ranks, int& probes) const {
    for (; probes > 0 && !(at == end); ++at, --probes) {
      Chunk& chunk = *chunks_[at.chunk_];
      if (at.item_ == 0 && !hasRanks(chunk, ranks) && at.chunk_ != end.chunk_) {
        if (chunk.count >= probes) return false;
        probes -= chunk.count - 1;
        at.item_ = chunk.count - 1;
        continue;
      }
      if (at->count >= ranks) return true;
    }
    return false;
  }

  bool stepBackTo(Iterator& at, int ranks, int& probes) const {
    const Iterator first = begin();
    while (probes > 0 && !(at == first)) {
      --at;
      Chunk& chunk = *chunks_[at.chunk_];
      if (at.item_ + 1 == chunk.count && !hasRanks(chunk, ranks)) {
        if (chunk.count >= probes) return false;
        probes -= chunk.count;
        at.item_ = 0;
        continue;
      }
      if (at->count >= ranks) return true;
      --probes;
    }
    return false;
  }

  void clear() {
    std::move(chunks_.begin(), chunks_.end(), std::back_inserter(spare_));
    chunks_.clear();
    last_ready_.clear();
  }

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

  static int placeIn(const Chunk& chunk, double ready) {
    const Block* const begin = chunk.items;
    return static_cast<int>(
        std::upper_bound(begin, begin + chunk.count, ready,
                         [](double time, const Block& block) { return time < block.ready; }) -
        begin);
  }

  // Whether a block may have so many ranks.
  static bool hasRanks(Chunk& chunk, int ranks) {
    if (chunk.narrower && chunk.widest >= ranks) {
      chunk.widest = 0;
      for (int i = 0; i < chunk.count; ++i) {
        chunk.widest = std::max(chunk.widest, chunk.items[i].count);
      }
      chunk.narrower = false;
    }
    return chunk.widest >= ranks;
  }

  Chunk& addChunk(size_t at) {
    if (spare_.empty()) spare_.push_back(std::make_unique<Chunk>());
    Chunk& chunk = *spare_.back();
    chunk.items = chunk.room.data();
    chunk.count = 0;
    chunk.widest = 0;
    chunk.narrower = false;
    const auto place =
        chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at), std::move(spare_.back()));
    last_ready_.insert(last_ready_.begin() + static_cast<std::ptrdiff_t>(at), 0.0);
    spare_.pop_back();
    return **place;
  }

  // Moves the later half of a full chunk into a new one behind it.
  void split(size_t which) {
    Chunk& later = addChunk(which + 1);
    Chunk& chunk = *chunks_[which];
    chunk.count = kMost / 2;
    later.count = kMost - chunk.count;
    std::copy_n(chunk.items + chunk.count, later.count, later.items);
    later.widest = chunk.widest;
    chunk.narrower = true;
    later.narrower = true;
    last_ready_[which + 1] = last_ready_[which];
    last_ready_[which] = chunk.items[chunk.count - 1].ready;
  }

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<double> last_ready_;             // of each chunk's last block
  std::vector<std::unique_ptr<Chunk>> spare_;  // emptied, for new ones
};

}  // namespace hdpcomm::planner
