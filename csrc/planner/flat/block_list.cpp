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
  last_ready_[which] = chunk.items[chunk.count - 1].ready;
}

BlockList::Iterator BlockList::erase(Iterator at) {
  Chunk& chunk = *chunks_[at.chunk_];
  Block* const place = chunk.items.data() + at.item_;
  std::copy(place + 1, chunk.items.data() + chunk.count, place);
  if (--chunk.count == 0) {
    spare_.push_back(std::move(chunks_[at.chunk_]));
    chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(at.chunk_));
    last_ready_.erase(last_ready_.begin() + static_cast<std::ptrdiff_t>(at.chunk_));
    return {this, at.chunk_, 0};
  }
  last_ready_[at.chunk_] = chunk.items[chunk.count - 1].ready;
  if (at.item_ == chunk.count) return {this, at.chunk_ + 1, 0};
  return at;
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

BlockList::Chunk& BlockList::addChunk(size_t at) {
  if (spare_.empty()) spare_.push_back(std::make_unique<Chunk>());
  spare_.back()->count = 0;
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
  last_ready_[which + 1] = last_ready_[which];
  last_ready_[which] = chunk.items[chunk.count - 1].ready;
}

}  // namespace hdpcomm::planner
