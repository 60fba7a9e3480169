#include "testing/capture.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace hdpcomm::testing {

using simulated::OpKind;
using simulated::Point;

Capture::Capture(uint64_t number, const FastStream* origin, std::shared_ptr<DeviceState> device)
    : number_(number), device_(std::move(device)), lane_of_{{origin, 0}}, counts_(1) {}

Capture::~Capture() {
  for (const auto& stream : streams_) stream->close();
}

void Capture::add(const FastStream* stream, Op op) {
  const size_t lane = lane_of_.at(stream);
  ++counts_[lane];
  nodes_.push_back({lane, std::move(op)});
}

void Capture::wait(const FastStream* stream, const Moment& moment, Site site) {
  const auto [lane, fresh] = lane_of_.emplace(stream, counts_.size());
  if (fresh) counts_.push_back(0);
  Op op;
  op.kind = OpKind::kWaitEvent;
  op.site = site;
  ++counts_[lane->second];
  nodes_.push_back({lane->second, std::move(op), moment.lane, moment.count});
}

Capture::Moment Capture::moment(const FastStream* stream) {
  const size_t lane = lane_of_.at(stream);
  return {shared_from_this(), lane, counts_[lane]};
}

// Walks backwards from the end of the first lane to find how far it waits for each other lane.
void Capture::end() {
  ended_ = true;
  std::vector<size_t> reached(counts_.size());
  reached[0] = counts_[0];
  std::vector<size_t> place = counts_;  // by lane: position of the operation last visited
  bool joined = true;
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    const size_t own = --place[node->lane];
    const bool waits = node->op.kind == OpKind::kWaitEvent;
    joined = joined && (waits || own < reached[node->lane]);
    if (!waits || own >= reached[node->lane]) continue;
    reached[node->after_lane] = std::max(reached[node->after_lane], node->after_count);
  }
  if (joined) return;
  throwInvalidUsage(
      "the capture ended while a stream had work that the first stream does not wait for: wait "
      "for every operation in the background before the end");
}

void Capture::launch(Stream stream) {
  const std::shared_ptr<FastStream> caller = find_(stream);
  if (streams_.empty()) {
    for (size_t lane = 0; lane < counts_.size(); ++lane) {
      streams_.push_back(std::make_shared<FastStream>(device_));
    }
  }
  const auto waitFor = [](FastStream& waiting, Point point, Site site) {
    Op op;
    op.kind = OpKind::kWaitEvent;
    op.site = site;
    waiting.submit({std::move(op), std::move(point)});
  };
  const Point begin{caller, caller->submitted()};
  std::vector<uint64_t> before;  // by lane: operations submitted before this launch
  for (const auto& lane : streams_) {
    waitFor(*lane, begin, {});
    before.push_back(lane->submitted());
  }
  for (const Node& node : nodes_) {
    if (node.op.kind == OpKind::kWaitEvent) {
      waitFor(*streams_[node.lane],
              {streams_[node.after_lane], before[node.after_lane] + node.after_count},
              node.op.site);
    } else {
      streams_[node.lane]->submit({node.op, {}});
    }
  }
  waitFor(*caller, {streams_[0], streams_[0]->submitted()}, {});
}

}  // namespace hdpcomm::testing
