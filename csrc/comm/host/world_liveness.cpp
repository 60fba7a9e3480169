// Deadlines of a World from the moves of the ranks that it waits for (liveness.hpp).
#include <algorithm>

#include "comm/host/world.hpp"

namespace hdpcomm {
void World::goByLiveness(bool on) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (on && over()) throwUnusable();
  by_liveness_ += on ? 1 : -1;
  if (on) tellLocked();
}

void World::tick() {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  liveness_.tick(Clock::now());
  tellLocked();
}

uint64_t World::beginActivity(const std::string& what, double limit_s) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  const auto now = Clock::now();
  const uint64_t activity = liveness_.begin(what, durationOf(limit_s), now);
  tellLocked();
  publishPulseLocked(now);  // a process that is stopped in the activity has named it
  return activity;
}

void World::endActivity(uint64_t activity) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  liveness_.end(activity, Clock::now());
}

void World::tellOfPart(PartMoves moves) {
  std::lock_guard lock(mutex_);
  if (moves.count != part_moves_.count) {
    part_moved_ = Clock::now();
    liveness_.tick(part_moved_);
  }
  part_moves_ = std::move(moves);
}

void World::beginWait() {
  std::lock_guard lock(mutex_);
  liveness_.beginWait();
}

void World::endWait() {
  std::lock_guard lock(mutex_);
  part_moved_ = Clock::now();
  liveness_.endWait(part_moved_);
}

World::Allowed World::allowed(const std::vector<int>& awaited, Clock::time_point start) {
  std::lock_guard lock(mutex_);
  return allowedLocked(awaited, start, Clock::now());
}

// From now on the progress thread tells the others when this rank moved: one that tells nothing is
// given the plain timeout.
void World::tellLocked() {
  if (tells_.exchange(true)) return;
  publishPulseLocked(Clock::now());
  ensureProgressThread();
}

void World::publishPulseLocked(Clock::time_point now) {
  liveness_.look(static_cast<uint64_t>(next_seq_) + transport_->moves() +
                     fetches_.load(std::memory_order_relaxed),
                 now);
  Pulse pulse = ownPulseLocked(now);
  if (!liveness_.busy(now)) {
    std::vector<int> awaited = part_moves_.awaited;
    if (waiters_.load(std::memory_order_relaxed) > 0 && !queue_.empty()) {
      const Work& blocking = blocking_ != nullptr ? *blocking_ : *queue_.back();
      const auto more = awaitedLocked(blocking);
      awaited.insert(awaited.end(), more.begin(), more.end());
    }
    const auto slowest = slowestLocked(awaited, now);
    if (slowest && slowest->doing.empty()) {
      pulse.doing = "waits for rank " + std::to_string(slowest->culprit) + ", which tells nothing";
    } else if (slowest) {
      pulse.moved = std::max(pulse.moved, slowest->moved);
      pulse.culprit = slowest->culprit;
      pulse.culprit_moved = slowest->culprit_moved;
      pulse.doing = slowest->doing;
    }
  }
  transport_->publishPulse(pulse);
}

Pulse World::ownPulseLocked(Clock::time_point now) const {
  const auto moved = liveness_.moved(now);
  std::string doing = liveness_.activity(now);
  if (doing.empty() && part_moved_ >= moved) doing = part_moves_.last;
  if (doing.empty() && next_seq_ == 0) doing = "joined";
  if (doing.empty()) {
    const auto last = recorder_.last();
    doing = last ? describe(*last) : "operation #" + std::to_string(next_seq_ - 1);
  }
  return {moved, moved, rank(), doing};
}

// The ranks without which the operation cannot go on.
std::vector<int> World::awaitedLocked(const Work& work) const {
  for (const auto& each : queue_) {
    if (each.get() != &work && each->allPosted()) continue;
    // A step's own requests end before the next step is posted.
    const bool step = each->completion_.pending > 0;
    return transport_->awaited(step ? &each->completion_ : &each->deferred_);
  }
  return {};
}

// The pulse of the rank that has not moved for longest. A rank that tells nothing has never moved.
std::optional<Pulse> World::slowestLocked(const std::vector<int>& ranks, Clock::time_point now) {
  std::optional<Pulse> slowest;
  for (const int awaited : ranks) {
    Pulse pulse = awaited == rank()
                      ? ownPulseLocked(now)
                      : transport_->pulse(awaited).value_or(Pulse{{}, {}, awaited, {}});
    if (pulse.culprit == rank() && awaited != rank()) {
      pulse.culprit = awaited;
      pulse.culprit_moved = pulse.moved;
      pulse.doing = "waits for rank " + std::to_string(rank()) + ", directly or through others";
    }
    if (!slowest || pulse.moved < slowest->moved) slowest = std::move(pulse);
  }
  return slowest;
}

World::Allowed World::allowedLocked(const std::vector<int>& awaited, Clock::time_point start,
                                    Clock::time_point now) {
  const auto slowest = slowestLocked(awaited, now);
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
