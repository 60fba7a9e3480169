// Deadlines of device operations, and what the others hear of them (comm/host/liveness.hpp).
#include <algorithm>
#include <utility>

#include "comm/stream/stream_engine.hpp"

namespace hdpcomm {

// The deadline of an operation without one of its own, counted from `start`.
std::optional<Error> StreamEngine::checkDeadline(StreamWork& work, Clock::time_point start,
                                                 Clock::time_point now) {
  const double seconds = secondsBetween(start, now);
  if (seconds <= timeout_s_ || now < work.allowed_) return std::nullopt;
  std::optional<Deadlines::Stuck> stuck;
  if (work.by_liveness_ && world_ != nullptr) {
    Deadlines::Allowed allowed = world_->allowed(calls_.awaitedBy(work), start);
    work.allowed_ = allowed.until;
    if (now < work.allowed_) return std::nullopt;
    stuck = std::move(allowed.stuck);
  }
  return timeoutOf(work, seconds, stuck);
}

// What the others hear of this rank's device operations (comm/host/liveness.hpp).
void StreamEngine::reportMoves() {
  if (world_ == nullptr || !world_->tells()) return;
  Deadlines::PartMoves moves{.awaited = {}, .last = {}, .count = next_seq_ + num_ended_};
  for (const WorkPtr& work : running_) {
    if (!work->submitted_ || failed_) continue;
    if (ended(*work)) {
      ++moves.count;
    } else if (work->started_) {
      const std::vector<int> awaited = calls_.awaitedBy(*work);
      moves.awaited.insert(moves.awaited.end(), awaited.begin(), awaited.end());
    }
  }
  const auto last = recorder_.last();
  moves.last =
      last ? describe(*last) : "device operation #" + std::to_string(next_seq_ - 1) + " called";
  world_->reportPartMoves(std::move(moves));
}

Error StreamEngine::timeoutOf(const StreamWork& work, double seconds,
                              const std::optional<Deadlines::Stuck>& stuck) const {
  const std::string hint =
      stuck ? stuck->text : "look for a rank that did not call it, or raise timeout=";
  return work.withContext(
      Error(ErrorKind::kTimeout,
            "rank " + std::to_string(rank_) + " waited " + std::to_string(seconds) + " s in " +
                describe(work.call_) + " (ranks " + listOf(*work.ranks_) + "): " + hint,
            {.rank = rank_, .peer = stuck ? stuck->rank : -1, .op = {}, .ranks = {}, .seq = -1}));
}

}  // namespace hdpcomm
