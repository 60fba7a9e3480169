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
  Block* const place = chunk.items.data() + placeIn(chunk, block.ready);
  std::copy_backward(place, chunk.items.data() + chunk.count, chunk.items.data() + chunk.count + 1);
  *place = block;
  ++chunk.count;
  chunk.widest = std::max(chunk.widest, block.count);
  last_ready_[which] = chunk.items[chunk.count - 1].ready;
}

BlockList::Iterator BlockList::erase(Iterator at) {
  Chunk& chunk = *chunks_[at.chunk_];
  Block* const place = chunk.items.data() + at.item_;
  const bool widest = place->count == chunk.widest;
  std::copy(place + 1, chunk.items.data() + chunk.count, place);
  --chunk.count;
  if (widest) findWidest(chunk);
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

BlockList::Iterator BlockList::find(const Block& block) const {
  const auto before = [](const Block& a, const Block& b) {
    return a.ready != b.ready ? a.ready < b.ready : a.order < b.order;
  };
  const auto last = std::lower_bound(last_ready_.begin(), last_ready_.end(), block.ready);
  auto which = static_cast<size_t>(last - last_ready_.begin());
  while (before(chunks_[which]->items[chunks_[which]->count - 1], block)) ++which;
  const Block* const begin = chunks_[which]->items.data();
  const Block* const place = std::lower_bound(begin, begin + chunks_[which]->count, block, before);
  return {this, which, static_cast<int>(place - begin)};
}

bool BlockList::stepTo(Iterator& at, const Iterator& end, int ranks, int& probes) const {
  for (; probes > 0 && !(at == end); ++at, --probes) {
    const Chunk& chunk = *chunks_[at.chunk_];
    if (at.item_ == 0 && chunk.widest < ranks && at.chunk_ != end.chunk_) {
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
    const Chunk& chunk = *chunks_[at.chunk_];
    if (at.item_ + 1 == chunk.count && chunk.widest < ranks) {
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
  const Block* const begin = chunk.items.data();
  return static_cast<int>(
      std::upper_bound(begin, begin + chunk.count, ready,
                       [](double time, const Block& block) { return time < block.ready; }) -
      begin);
}

void BlockList::findWidest(Chunk& chunk) {
  chunk.widest = 0;
  for (int i = 0; i < chunk.count; ++i) chunk.widest = std::max(chunk.widest, chunk.items[i].count);
}

BlockList::Chunk& BlockList::addChunk(size_t at) {
  if (spare_.empty()) spare_.push_back(std::make_unique<Chunk>());
  spare_.back()->count = 0;
  spare_.back()->widest = 0;
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
  std::copy_n(chunk.items.data() + chunk.count, later.count, later.items.data());
  findWidest(chunk);
  findWidest(later);
  last_ready_[which + 1] = last_ready_[which];
  last_ready_[which] = chunk.items[chunk.count - 1].ready;
}

}  // namespace hdpcomm::planner
