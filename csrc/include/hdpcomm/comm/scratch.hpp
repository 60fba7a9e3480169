// Device memory that collectives use between their steps, recycled in the order of streams.
#pragma once

#include <memory>
#include <vector>

#include "hdpcomm/device/handles.hpp"

namespace hdpcomm {

class ScratchPool {
 public:
  explicit ScratchPool(DevicePtr device) : device_(std::move(device)) {}

  // At least `bytes` bytes for work of `stream` from now on. A block whose last work is not known
  // to be done is not waited for: that work may depend on what this rank does next. `captured`: for
  // a graph, which keeps it; then no memory can be allocated, so one of that size must be free.
  std::byte* take(size_t bytes, Stream stream, bool captured);
  // Gives it back: free behind the work that `stream` holds now. A graph's block never is.
  void give(std::byte* memory, Stream stream);
  size_t bytes() const;

 private:
  struct Block {
    DeviceMemory memory;
    size_t bytes;
    OwnedEvent last;     // its last work
    Stream stream;       // of that work
    bool taken = false;
    bool of_graph = false;
  };

  DevicePtr device_;
  std::vector<Block> blocks_;
};

}  // namespace hdpcomm
