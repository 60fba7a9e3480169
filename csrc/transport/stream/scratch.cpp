#include "transport/stream/scratch.hpp"

#include <algorithm>
#include <bit>

namespace hdpcomm {

std::byte* ScratchPool::take(size_t bytes, Stream stream, bool captured) {
  const size_t size = std::bit_ceil(std::max<size_t>(bytes, 4096));
  for (Block& block : blocks_) {
    if (block.bytes != size || block.of_graph || (block.stream != stream && !captured)) continue;
    block.of_graph = captured;
    return static_cast<std::byte*>(block.memory.get());
  }
  blocks_.push_back({DeviceMemory(device_, device_->allocate(size)), size, stream, captured});
  return static_cast<std::byte*>(blocks_.back().memory.get());
}

size_t ScratchPool::bytes() const {
  size_t total = 0;
  for (const Block& block : blocks_) total += block.bytes;
  return total;
}

}  // namespace hdpcomm
