#include "planner/flat/block_list.hpp"

#include <algorithm>
#include <iterator>

namespace hdpcomm::planner {

BlockList::Iterator BlockList::upperBound(double ready) const {
  const auto last = std::upper_bound(last_ready_.begin(), last_ready_.end(), ready);
  if (last == last_ready_.end()) return end();
  const auto chunk = static_cast<size_t>(last - last_ready_.begin());
  return {this, chunk, placeIn(*chunks_[chunk], ready)};
}

void BlockList::insert(const Block& block) {
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
    std::copy_backward(chunk.items + at, chunk.items + chunk.count, chunk.items + chunk.count + 1);
  }
  chunk.items[at] = block;
  ++chunk.count;
  chunk.widest = std::max(chunk.widest, block.count);
  last_ready_[which] = chunk.items[chunk.count - 1].ready;
}

BlockList::Iterator BlockList::erase(Iterator at) {
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

bool BlockList::replace(Iterator at, const Block& block) {
  Chunk& chunk = *chunks_[at.chunk_];
  Block& place = chunk.items[at.item_];
  Iterator next = at;
  if (!(++next == end()) && next->ready == place.ready) return false;
  chunk.narrower |= place.count == chunk.widest;
  place = block;
  chunk.widest = std::max(chunk.widest, block.count);
  return true;
}

BlockList::Iterator BlockList::find(const Block& block) const {
  const auto before = [](const Block& a, const Block& b) {
    return a.ready != b.ready ? a.ready < b.ready : a.order < b.order;
  };
  const auto chunk =
      std::partition_point(chunks_.begin(), chunks_.end(), [&](const std::unique_ptr<Chunk>& each) {
        return before(each->items[each->count - 1], block);
      });
  const auto which = static_cast<size_t>(chunk - chunks_.begin());
  const Block* const begin = chunks_[which]->items;
  const Block* const place = std::lower_bound(begin, begin + chunks_[which]->count, block, before);
  return {this, which, static_cast<int>(place - begin)};
}

bool BlockList::stepTo(Iterator& at, const Iterator& end, int ranks, int& probes) const {
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

bool BlockList::stepBackTo(Iterator& at, int ranks, int& probes) const {
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

void BlockList::clear() {
  std::move(chunks_.begin(), chunks_.end(), std::back_inserter(spare_));
  chunks_.clear();
  last_ready_.clear();
}

int BlockList::placeIn(const Chunk& chunk, double ready) {
  const Block* const begin = chunk.items;
  return static_cast<int>(
      std::upper_bound(begin, begin + chunk.count, ready,
                       [](double time, const Block& block) { return time < block.ready; }) -
      begin);
}

bool BlockList::hasRanks(Chunk& chunk, int ranks) {
  if (chunk.narrower && chunk.widest >= ranks) {
    chunk.widest = 0;
    for (int i = 0; i < chunk.count; ++i) {
      chunk.widest = std::max(chunk.widest, chunk.items[i].count);
    }
    chunk.narrower = false;
  }
  return chunk.widest >= ranks;
}

BlockList::Chunk& BlockList::addChunk(size_t at) {
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

void BlockList::split(size_t which) {
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

}  // namespace hdpcomm::planner
