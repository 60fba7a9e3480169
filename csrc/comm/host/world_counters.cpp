// The counters that this rank owns, and its fetches from those of other hosts (counter.hpp).
#include <unistd.h>

#include <algorithm>

#include "comm/host/world.hpp"
#include "transport/failures.hpp"

namespace hdpcomm {
OwnCounters::Place World::openCounter() {
  refuseInChild();
  std::lock_guard lock(mutex_);
  if (over()) throwUnusable();
  if (const auto place = counters_.open(*transport_->counterWords(rank()))) return *place;
  throwInvalidUsage("rank " + std::to_string(rank()) + " owns " + std::to_string(kCounterWords) +
                    " counters already: close those that are over");
}

void World::closeCounter(const OwnCounters::Place& place) {
  if (::getpid() != pid_) return;  // a forked child: the counter is its parent's
  std::lock_guard lock(mutex_);
  counters_.close(*transport_->counterWords(rank()), place, over());
}

void World::leaveCountersLocked() {
  const auto words = transport_->counterWords(rank());
  for (CounterWord& word : words->at) closeWord(word, true);
}

std::shared_ptr<CounterWords> World::counterWords(int owner) {
  return transport_->counterWords(owner);
}

void World::checkUsable() {
  refuseInChild();
  if (!over()) return;
  std::lock_guard lock(mutex_);
  throwUnusable();
}

FetchResult World::fetchFrom(int owner, const FetchRequest& request, const Ranks& ranks,
                             const InterruptCheck& check_interrupt) {
  const auto start = Clock::now();
  beginWait();
  const auto end = [&](const Error* error) {
    endWait();
    std::lock_guard lock(mutex_);
    waited_.add(ranks, Clock::now() - start);
    if (error != nullptr && first_cause_.empty()) first_cause_ = firstCause(error->what());
  };
  try {
    const FetchResult result = waitForFetch(owner, request, start, check_interrupt);
    end(nullptr);
    return result;
  } catch (const Error& error) {
    ErrorContext context = error.context();
    context.rank = rank();
    context.peer = owner;
    context.op = "fetch_add";
    context.ranks = *ranks;
    const Error told(error.kind(), error.what(), context);
    end(&told);
    throw told;
  } catch (...) {
    end(nullptr);
    throw;
  }
}

// Without the lock, so that other threads go on. Not an operation: it has no number, and its
// failure puts no pair out of step.
FetchResult World::waitForFetch(int owner, const FetchRequest& request, Clock::time_point start,
                                const InterruptCheck& check_interrupt) {
  const auto liveness = durationOf(liveness_s_);
  const auto fetch = transport_->startFetch(owner, request);
  auto deadline = start + durationOf(timeout_s_);
  auto next_check = start + liveness;
  for (;;) {
    if (const auto result = fetch->wait(std::min(next_check, deadline))) return *result;
    if (over()) {
      throw Error(ErrorKind::kAborted,
                  "rank " + std::to_string(rank()) + " left its world during fetch_add()");
    }
    if (const auto gone = departure(owner)) {
      throw Error(gone->kind(), gone->what() + std::string(": it owned the counter"));
    }
    const auto now = Clock::now();
    std::optional<Deadlines::Stuck> stuck;
    if (now >= deadline && goesByLiveness()) {
      const Deadlines::Allowed allowed = this->allowed({owner}, start);
      deadline = std::max(deadline, allowed.until);
      stuck = allowed.stuck;
    }
    if (now >= deadline) {
      const double waited_s = std::chrono::duration<double>(now - start).count();
      throw Error(
          ErrorKind::kTimeout,
          "rank " + std::to_string(rank()) + " waited " + std::to_string(waited_s) +
              " s in fetch_add() for rank " + std::to_string(owner) + ", whose threads " +
              "answer whatever its program does: " +
              (stuck ? stuck->text : "look whether its process is stopped, or raise timeout="));
    }
    next_check = now + liveness;
    if (check_interrupt) check_interrupt();
  }
}

}  // namespace hdpcomm
