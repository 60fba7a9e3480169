#include "hdpcomm/comm/scratch.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "hdpcomm/base/error.hpp"

namespace hdpcomm {

std::byte* ScratchPool::take(size_t bytes, Stream stream, bool captured) {
  const size_t size = std::bit_ceil(std::max<size_t>(bytes, 4096));
  for (Block& block : blocks_) {
    if (block.taken || block.bytes != size) continue;
    // While a stream is captured no event can be queried, and waiting for one from outside is not
    // allowed: the caller has synchronized before (Communicator.synchronize()).
    const bool in_order = !captured && block.stream == stream;
    if (!captured && !in_order && !device_->query(block.last.get())) continue;
    if (!captured) device_->wait(stream, block.last.get());
    block.taken = true;
    block.of_graph = captured;
    return static_cast<std::byte*>(block.memory.get());
  }
  if (captured) {
    throwInvalidUsage("a collective that is captured into a graph needs " + std::to_string(size) +
                      " bytes of scratch memory, and none can be allocated during the capture: run "
                      "the same collective once, and Communicator.synchronize(), before it");
  }
  Block& block = blocks_.emplace_back();
  block.memory = DeviceMemory(device_, device_->allocate(size));
  block.bytes = size;
  block.last = OwnedEvent(device_, device_->createEvent());
  block.taken = true;
  return static_cast<std::byte*>(block.memory.get());
}

void ScratchPool::give(std::byte* memory, Stream stream) {
  for (Block& block : blocks_) {
    if (block.memory.get() != memory || block.of_graph) continue;
    device_->record(block.last.get(), stream);
    block.stream = stream;
    block.taken = false;
  }
}

size_t ScratchPool::bytes() const {
  size_t total = 0;
  for (const Block& block : blocks_) total += block.bytes;
  return total;
}

}  // namespace hdpcomm
