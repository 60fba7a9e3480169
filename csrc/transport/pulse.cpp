#include "transport/pulse.hpp"

#include <algorithm>
#include <cstring>

namespace hdpcomm {
namespace {

using std::chrono::nanoseconds;

Pulse::Time timeOf(int64_t ns, Pulse::Time now) {
  return pulseTime(Pulse::Time(std::chrono::duration_cast<Pulse::Time::duration>(nanoseconds(ns))),
                   now);
}

int64_t nanosecondsOf(Pulse::Time time) {
  return std::chrono::duration_cast<nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

std::string pulseText(const char* text, size_t length) {
  std::string made(text, ::strnlen(text, std::min(length, kPulseText)));
  std::replace_if(
      made.begin(), made.end(), [](char each) { return each < ' ' || each > '~'; }, '?');
  return made;
}

Pulse::Time pulseTime(Pulse::Time time, Pulse::Time now) {
  return std::clamp(time, now - std::chrono::milliseconds(kOldestMoveMs), now);
}

PulseRecord recordOf(const Pulse& pulse) {
  PulseRecord record{};
  record.moved_ns = nanosecondsOf(pulse.moved);
  record.culprit_moved_ns = nanosecondsOf(pulse.culprit_moved);
  record.culprit = pulse.culprit;
  std::memcpy(record.doing, pulse.doing.data(), std::min(pulse.doing.size(), kPulseText));
  return record;
}

Pulse pulseOf(const PulseRecord& record, int rank, int num_ranks, Pulse::Time now) {
  Pulse pulse;
  pulse.moved = timeOf(record.moved_ns, now);
  pulse.culprit_moved = timeOf(record.culprit_moved_ns, now);
  const bool exists = record.culprit >= 0 && record.culprit < num_ranks;
  pulse.culprit = exists ? static_cast<int>(record.culprit) : rank;
  pulse.doing = pulseText(record.doing, kPulseText);
  return pulse;
}

}  // namespace hdpcomm
