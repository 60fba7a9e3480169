// Device memory that collectives use between their steps. A block belongs to the stream that used
// it first, and only operations of that stream use it again: the stream's order keeps them apart.
// So there is one block for each size (rounded up to a power of two) and stream, however many
// operations there are.
#pragma once

#include <memory>
#include <vector>

#include "device/handles.hpp"

namespace hdpcomm {

class ScratchPool {
 public:
  explicit ScratchPool(DevicePtr device) : device_(std::move(device)) {}

  // At least `bytes` bytes for the next operation of `stream`. `captured`: for a graph, which keeps
  // the block; it may be one of another stream, for whose work the caller has waited
  // (Communicator.synchronize()).
  std::byte* take(size_t bytes, Stream stream, bool captured);
  size_t bytes() const;
  // All work on the blocks is done.
  void free() { blocks_.clear(); }

 private:
  struct Block {
    DeviceMemory memory;
    size_t bytes;
    Stream stream;
    bool of_graph;
  };

  DevicePtr device_;
  std::vector<Block> blocks_;
};

}  // namespace hdpcomm
