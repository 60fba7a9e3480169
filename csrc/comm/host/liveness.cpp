#include "comm/host/liveness.hpp"

#include <algorithm>
#include <cstdio>

namespace hdpcomm {
namespace {

std::string inSeconds(Clock::duration time) {
  char text[32];
  const double seconds = std::chrono::duration<double>(time).count();
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

}  // namespace

void Liveness::look(uint64_t count, Clock::time_point now) {
  if (count != count_) tick(now);
  count_ = count;
}

void Liveness::tick(Clock::time_point now) { moved_ = std::max(moved_, now); }

uint64_t Liveness::begin(const std::string& what, Clock::duration limit, Clock::time_point now) {
  tick(now);
  activities_.push_back({next_activity_, what, now, limit, std::this_thread::get_id()});
  return next_activity_++;
}

// To leave an activity that was over its limit is a move, too: the rank goes on.
void Liveness::end(uint64_t activity, Clock::time_point now) {
  tick(now);
  std::erase_if(activities_, [&](const Activity& each) { return each.number == activity; });
}

void Liveness::endWait(Clock::time_point now) {
  tick(now);
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), std::this_thread::get_id()));
}

bool Liveness::counts(const Activity& activity, Clock::time_point now) const {
  return now - activity.begun < activity.limit &&
         std::find(waiting_.begin(), waiting_.end(), activity.thread) == waiting_.end();
}

bool Liveness::busy(Clock::time_point now) const {
  return std::any_of(activities_.begin(), activities_.end(),
                     [&](const Activity& each) { return counts(each, now); });
}

// The innermost one that counts, else the one whose limit is or was last.
std::string Liveness::activity(Clock::time_point now) const {
  if (activities_.empty()) return "";
  const auto counted = std::find_if(activities_.rbegin(), activities_.rend(),
                                    [&](const Activity& each) { return counts(each, now); });
  const Activity& named = counted != activities_.rend()
                              ? *counted
                              : *std::max_element(activities_.begin(), activities_.end(),
                                                  [](const Activity& a, const Activity& b) {
                                                    return a.begun + a.limit < b.begun + b.limit;
                                                  });
  const auto since = now - named.begun;
  return "busy (" + named.what + ") for " + inSeconds(since) +
         (since < named.limit ? "" : ", its limit is " + inSeconds(named.limit));
}

}  // namespace hdpcomm
