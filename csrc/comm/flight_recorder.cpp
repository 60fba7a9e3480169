#include "comm/flight_recorder.hpp"

#include <algorithm>
#include <bit>
#include <chrono>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace hdpcomm {
namespace {

int64_t systemNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string describe(const FlightRecord& record) {
  const char* state = record.state == FlightRecord::State::kDone     ? " ended"
                      : record.state == FlightRecord::State::kFailed ? " failed"
                                                                     : " under way";
  return std::string(opName(record.call.op)) + " #" + std::to_string(record.seq) + state;
}

uint64_t FlightRecorder::ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                               std::chrono::nanoseconds(1));
#endif
}

FlightRecorder::FlightRecorder(size_t capacity) {
  if (capacity == 0) return;
  records_.resize(std::bit_ceil(capacity));
  mask_ = records_.size() - 1;
  first_ticks_ = ticks();
  first_ns_ = systemNs();
}

FlightRecorder::Group& FlightRecorder::lookUp(uint64_t hash, const std::vector<int>& ranks) {
  const auto [found, added] = groups_.try_emplace(hash);
  if (added) found->second.ranks = ranks;
  recent_[hash & (kRecent - 1)] = {hash, &found->second};
  return found->second;
}

FlightRecorder::Flight FlightRecorder::read() const {
  Flight flight;
  if (!on()) return flight;
  const uint64_t kept = std::min<uint64_t>(next_, records_.size());
  flight.first = next_ - kept;
  const double ns_per_tick = static_cast<double>(systemNs() - first_ns_) /
                             static_cast<double>(std::max<uint64_t>(ticks() - first_ticks_, 1));
  const auto inNs = [&](uint64_t at) {
    const auto passed = static_cast<double>(static_cast<int64_t>(at - first_ticks_));
    return static_cast<uint64_t>(first_ns_ + static_cast<int64_t>(passed * ns_per_tick));
  };
  for (uint64_t i = flight.first; i < next_; ++i) {
    FlightRecord& record = flight.records.emplace_back(records_[i & mask_]);
    record.started = inNs(record.started);
    if (record.ended != 0) record.ended = inNs(record.ended);
  }
  for (const auto& [hash, group] : groups_) flight.groups.emplace(hash, group.ranks);
  return flight;
}

void FlightRecorder::markQueued(Flight& flight, const Entry& entry) {
  for (uint64_t i = entry.first; i < entry.first + entry.count; ++i) {
    if (i < flight.first || i - flight.first >= flight.records.size()) continue;
    flight.records[i - flight.first].state = FlightRecord::State::kQueued;
  }
}

}  // namespace hdpcomm
