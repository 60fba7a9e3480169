#pragma once

#include <vector>

#include "base/fd.hpp"
#include "transport/host/shm/layout.hpp"
#include "transport/host/shm/shm.hpp"

namespace hdpcomm::shm {

class Segment final : public ShmSegment {
 public:
  Segment(Fd fd, Layout layout);

  std::string address() const override;
  void release() override { fd_ = Fd(); }

  const Layout& layout() const { return layout_; }
  Header& header() const { return *reinterpret_cast<Header*>(mapping_.data()); }
  Control& control(int rank) const {
    return *reinterpret_cast<Control*>(mapping_.data() + layout_.controlOffset(rank));
  }
  Channel& channel(int src, int dst) const {
    return *reinterpret_cast<Channel*>(mapping_.data() + layout_.channelOffset(src, dst));
  }
  std::byte* payload(int src, int dst) const {
    return reinterpret_cast<std::byte*>(&channel(src, dst) + 1);
  }
  // Touches the descriptor pages of a rank's channels now, so that the first message to a peer
  // causes no page fault.
  void populate(int rank, const std::vector<int>& peers) const;

 private:
  Fd fd_;
  Layout layout_;
  Mapping mapping_;
};

}  // namespace hdpcomm::shm
