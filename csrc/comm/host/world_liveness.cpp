// What a World tells of its moves, and asks of the others' (deadlines.hpp), under its lock.
#include <algorithm>

#include "comm/host/world.hpp"

namespace hdpcomm {

void World::goByLiveness(bool on) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (on && over()) throwUnusable();
  deadlines_.goByLiveness(on);
  if (on) tellLocked();
}

void World::tick() {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  deadlines_.moves().tick(Clock::now());
  tellLocked();
}

uint64_t World::beginActivity(const std::string& what, double limit_s) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  const auto now = Clock::now();
  const uint64_t activity = deadlines_.moves().begin(what, durationOf(limit_s), now);
  tellLocked();
  publishPulseLocked(now);  // a process that is stopped in the activity has named it
  return activity;
}

void World::endActivity(uint64_t activity) {
  refuseInChild();
  std::lock_guard lock(mutex_);
  deadlines_.moves().end(activity, Clock::now());
}

void World::reportPartMoves(Deadlines::PartMoves moves) {
  std::lock_guard lock(mutex_);
  deadlines_.reportPartMoves(std::move(moves));
}

void World::beginWait() {
  std::lock_guard lock(mutex_);
  deadlines_.moves().beginWait();
}

void World::endWait() {
  std::lock_guard lock(mutex_);
  deadlines_.endPartWait();
}

Deadlines::Allowed World::allowed(const std::vector<int>& awaited, Clock::time_point start) {
  std::lock_guard lock(mutex_);
  return deadlines_.allowed(awaited, start, lastOperationLocked(), Clock::now());
}

// From now on the progress thread tells the others when this rank moved.
void World::tellLocked() {
  if (!deadlines_.beginTelling()) return;
  publishPulseLocked(Clock::now());
  ensureProgressThread();
}

void World::publishPulseLocked(Clock::time_point now) {
  std::vector<int> awaited;
  if (waiters_.load(std::memory_order_relaxed) > 0 && !queue_.empty()) {
    awaited = awaitedLocked(blocking_ != nullptr ? *blocking_ : *queue_.back());
  }
  const uint64_t count = static_cast<uint64_t>(next_seq_) + transport_->moves() +
                         fetches_.load(std::memory_order_relaxed);
  deadlines_.publish(count, lastOperationLocked(), std::move(awaited), now);
}

std::string World::lastOperationLocked() const {
  if (next_seq_ == 0) return "joined";
  const auto last = recorder_.last();
  return last ? describe(*last) : "operation #" + std::to_string(next_seq_ - 1);
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

}  // namespace hdpcomm
