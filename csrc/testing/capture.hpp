// A captured graph of a TestDevice: what its streams were given during the capture, in order.
//
// As with CUDA: a stream joins the capture when it waits for an event that was recorded in it; it
// must not wait for one from outside; at the end every stream's work has to be joined to the first
// one's; events of a capture cannot be queried or synchronized with.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "device/simulated/fast_stream.hpp"

namespace hdpcomm::testing {

using simulated::DeviceState;
using simulated::FastStream;
using simulated::Op;

// Guarded by its device's lock until end().
class Capture : public std::enable_shared_from_this<Capture> {
 public:
  // A point of a captured stream: after the first `count` operations of its lane.
  struct Moment {
    std::shared_ptr<Capture> capture;
    size_t lane = 0;
    size_t count = 0;
  };

  Capture(uint64_t number, const FastStream* origin, std::shared_ptr<DeviceState> device);

  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  uint64_t number() const { return number_; }
  bool isOrigin(const FastStream* stream) const { return lane_of_.at(stream) == 0; }
  void add(const FastStream* stream, Op op);
  // Adds the stream to the capture if it does not take part yet.
  void wait(const FastStream* stream, const Moment& moment, Site site);
  Moment moment(const FastStream* stream);
  // Throws InvalidUsage unless the first lane waits for all work of the others.
  void end();
  bool ended() const { return ended_; }
  // Runs the graph behind what the stream holds, and before what it gets next. Launches follow each
  // other.
  void launch(Stream stream);

  // Tells launch() how to find a stream of the device.
  using Find = std::function<std::shared_ptr<FastStream>(Stream)>;
  void setFind(Find find) { find_ = std::move(find); }

 private:
  struct Node {
    size_t lane;
    Op op;
    size_t after_lane = 0;  // kWaitEvent: waits for the first after_count operations of this lane
    size_t after_count = 0;
  };

  bool ended_ = false;
  uint64_t number_;
  std::shared_ptr<DeviceState> device_;
  std::map<const FastStream*, size_t> lane_of_;
  std::vector<size_t> counts_;  // by lane: number of operations
  std::vector<Node> nodes_;
  Find find_;
  std::vector<std::shared_ptr<FastStream>> streams_;  // by lane, from the first launch on
};

}  // namespace hdpcomm::testing
