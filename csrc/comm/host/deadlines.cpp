#include "comm/host/deadlines.hpp"

#include <algorithm>
#include <utility>

namespace hdpcomm {

void Deadlines::reportPartMoves(PartMoves moves) {
  if (moves.count != part_.count) {
    part_moved_ = Clock::now();
    moves_.tick(part_moved_);
  }
  part_ = std::move(moves);
}

void Deadlines::endPartWait() {
  part_moved_ = Clock::now();
  moves_.endWait(part_moved_);
}

void Deadlines::publish(uint64_t count, const std::string& last, std::vector<int> awaited,
                        Clock::time_point now) {
  moves_.look(count, now);
  Pulse pulse = ownPulse(last, now);
  if (!moves_.busy(now)) {
    awaited.insert(awaited.begin(), part_.awaited.begin(), part_.awaited.end());
    const auto slowest = this->slowest(awaited, last, now);
    if (slowest && slowest->doing.empty()) {
      pulse.doing = "waits for rank " + std::to_string(slowest->culprit) + ", which tells nothing";
    } else if (slowest) {
      pulse.moved = std::max(pulse.moved, slowest->moved);
      pulse.culprit = slowest->culprit;
      pulse.culprit_moved = slowest->culprit_moved;
      pulse.doing = slowest->doing;
    }
  }
  transport_.publishPulse(pulse);
}

Pulse Deadlines::ownPulse(const std::string& last, Clock::time_point now) const {
  const auto moved = moves_.moved(now);
  std::string doing = moves_.activity(now);
  if (doing.empty() && part_moved_ >= moved) doing = part_.last;
  if (doing.empty()) doing = last;
  return {moved, moved, transport_.rank(), doing};
}

// The pulse of the rank that has not moved for longest. A rank that tells nothing has never moved.
std::optional<Pulse> Deadlines::slowest(const std::vector<int>& ranks, const std::string& last,
                                        Clock::time_point now) {
  const int rank = transport_.rank();
  std::optional<Pulse> slowest;
  for (const int awaited : ranks) {
    Pulse pulse = awaited == rank ? ownPulse(last, now)
                                  : transport_.pulse(awaited).value_or(Pulse{{}, {}, awaited, {}});
    if (pulse.culprit == rank && awaited != rank) {
      pulse.culprit = awaited;
      pulse.culprit_moved = pulse.moved;
      pulse.doing = "waits for rank " + std::to_string(rank) + ", directly or through others";
    }
    if (!slowest || pulse.moved < slowest->moved) slowest = std::move(pulse);
  }
  return slowest;
}

Deadlines::Allowed Deadlines::allowed(const std::vector<int>& awaited, Clock::time_point start,
                                      const std::string& last, Clock::time_point now) {
  const auto slowest = this->slowest(awaited, last, now);
  if (!slowest) return {start, std::nullopt};
  const auto stops = slowest->moved + durationOf(timeout_s_);
  const auto until = std::min(stops, start + durationOf(longest_wait_s_));
  if (slowest->doing.empty()) return {until, std::nullopt};
  if (now < stops) {
    return {until, Stuck{slowest->culprit,
                         "the ranks that it awaits still move, but no wait is longer than " +
                             std::to_string(longest_wait_s_) + " s: raise HDPCOMM_LONGEST_WAIT_S"}};
  }
  const std::chrono::duration<double> still = now - slowest->culprit_moved;
  return {until, Stuck{slowest->culprit, "rank " + std::to_string(slowest->culprit) +
                                             " has not moved for " + std::to_string(still.count()) +
                                             " s; last: " + slowest->doing +
                                             ": look at what it does, let it declare what takes "
                                             "long (Communicator.busy), or raise timeout="}};
}

}  // namespace hdpcomm
