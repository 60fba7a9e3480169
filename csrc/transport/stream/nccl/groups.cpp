#include "transport/stream/nccl/groups.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/error.hpp"

namespace hdpcomm::nccl {
namespace {

// When steps begin and messages can move, in rounds: a step takes one round; it begins when the
// step before has ended, and ends when the other ends of its messages have been posted.
struct Times {
  std::vector<size_t> begin;               // by step; the last one: when the schedule ends
  std::vector<std::vector<size_t>> sends;  // by step and message: when both ends are posted
  std::vector<std::vector<size_t>> recvs;
};

// Times of a schedule without deferred sends: a step is one group on all ranks.
Times timesOfSteps(const Schedule& schedule) {
  Times times;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    times.begin.push_back(i);
    times.sends.emplace_back(schedule.steps[i].sends.size(), i);
    times.recvs.emplace_back(schedule.steps[i].recvs.size(), i);
  }
  times.begin.push_back(schedule.steps.size());
  return times;
}

// The schedules of all ranks, which are pure functions of the request, run in rounds.
class Rounds {
 public:
  Rounds(ScheduleRequest request, Algorithm algorithm);
  Times timesOf(int rank) const;

 private:
  // The step in which the sender posts, or the receiver takes, the n-th message of a pair.
  using Steps = std::vector<std::vector<size_t>>;  // by peer
  struct Rank {
    Schedule schedule;
    Steps sends;
    Steps recvs;
    std::vector<size_t> begin;
    // Messages of the ended steps, by peer.
    std::vector<size_t> sent;
    std::vector<size_t> received;
  };
  bool advance(size_t rank);
  static size_t nextOf(std::map<int, size_t>& ahead, const std::vector<size_t>& done, int peer) {
    return done[static_cast<size_t>(peer)] + ahead[peer]++;
  }

  std::vector<Rank> ranks_;
};

Rounds::Rounds(ScheduleRequest request, Algorithm algorithm) {
  const auto p = static_cast<size_t>(request.group_size);
  request.algorithm = algorithm;
  for (size_t r = 0; r < p; ++r) {
    request.rank = static_cast<int>(r);
    Rank rank{makeSchedule(request), Steps(p), Steps(p), {0}, std::vector<size_t>(p),
              std::vector<size_t>(p)};
    for (size_t i = 0; i < rank.schedule.steps.size(); ++i) {
      const Step& step = rank.schedule.steps[i];
      for (const Send& send : step.sends) rank.sends[static_cast<size_t>(send.peer)].push_back(i);
      for (const Recv& recv : step.recvs) rank.recvs[static_cast<size_t>(recv.peer)].push_back(i);
    }
    ranks_.push_back(std::move(rank));
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < p; ++r) {
      while (advance(r)) moved = true;
    }
  }
  for (const Rank& rank : ranks_) {
    if (rank.begin.size() == rank.schedule.steps.size() + 1) continue;
    throw Error(ErrorKind::kInternal, "the steps of a schedule wait for each other for ever");
  }
}

// Ends the rank's current step, if the other ends of its messages have been posted.
bool Rounds::advance(size_t r) {
  Rank& rank = ranks_[r];
  const size_t i = rank.begin.size() - 1;
  if (i == rank.schedule.steps.size()) return false;
  const Step& step = rank.schedule.steps[i];
  size_t latest = rank.begin[i];
  std::map<int, size_t> ahead;
  const auto posted = [&](int peer, const Steps& steps, size_t number) {
    const std::vector<size_t>& begin = ranks_[static_cast<size_t>(peer)].begin;
    const size_t theirs = steps[r].at(number);
    if (theirs >= begin.size()) return false;
    latest = std::max(latest, begin[theirs]);
    return true;
  };
  for (const Recv& recv : step.recvs) {
    const Steps& theirs = ranks_[static_cast<size_t>(recv.peer)].sends;
    if (!posted(recv.peer, theirs, nextOf(ahead, rank.received, recv.peer))) return false;
  }
  const auto received = std::exchange(ahead, {});
  for (const Send& send : step.sends) {
    const size_t number = nextOf(ahead, rank.sent, send.peer);
    const Steps& theirs = ranks_[static_cast<size_t>(send.peer)].recvs;
    if (!send.deferred && !posted(send.peer, theirs, number)) return false;
  }
  for (const auto& [peer, count] : received) rank.received[static_cast<size_t>(peer)] += count;
  for (const auto& [peer, count] : ahead) rank.sent[static_cast<size_t>(peer)] += count;
  rank.begin.push_back(latest + 1);
  return true;
}

Times Rounds::timesOf(int r) const {
  const Rank& rank = ranks_[static_cast<size_t>(r)];
  Times times{rank.begin, {}, {}};
  std::map<int, size_t> sent;
  std::map<int, size_t> received;
  for (size_t i = 0; i < rank.schedule.steps.size(); ++i) {
    const Step& step = rank.schedule.steps[i];
    const auto both = [&](int peer, const Steps& theirs, size_t number) {
      const size_t step_there = theirs[static_cast<size_t>(r)].at(number);
      return std::max(rank.begin[i], ranks_[static_cast<size_t>(peer)].begin[step_there]);
    };
    auto& sends = times.sends.emplace_back();
    for (const Send& send : step.sends) {
      const Rank& peer = ranks_[static_cast<size_t>(send.peer)];
      sends.push_back(both(send.peer, peer.recvs, sent[send.peer]++));
    }
    auto& recvs = times.recvs.emplace_back();
    for (const Recv& recv : step.recvs) {
      const Rank& peer = ranks_[static_cast<size_t>(recv.peer)];
      recvs.push_back(both(recv.peer, peer.sends, received[recv.peer]++));
    }
  }
  return times;
}

// Whether any rank's schedule may defer sends; alike on all ranks, whether or not this one's does.
bool mayDefer(const Schedule& schedule) {
  return (schedule.op == OpCode::kReduceScatter || schedule.op == OpCode::kAllReduce) &&
         (schedule.algorithm == Algorithm::kDirect ||
          schedule.algorithm == Algorithm::kHierarchical);
}

Times timesOf(const ScheduleRequest& request, const Schedule& schedule) {
  if (mayDefer(schedule)) return Rounds(request, schedule.algorithm).timesOf(schedule.rank);
  for (const Step& step : schedule.steps) {
    for (const Send& send : step.sends) {
      if (!send.deferred) continue;
      throw Error(ErrorKind::kInternal, std::string("the schedule of ") + opName(schedule.op) +
                                            " by " + algorithmName(schedule.algorithm) +
                                            " defers sends, and was not expected to");
    }
  }
  return timesOfSteps(schedule);
}

// A group has at most this many distances of partners, and messages of a pair: each message counts
// once a side.
constexpr int kDistances = 32;
constexpr int kMessages = 4;
static_assert(2 * kDistances * kMessages <= kMaxGroup);

// Cuts a group so that both ends of a message put it in the same piece, whatever else they have: by
// its number on the pair and by the distance from the sender to the receiver.
void cut(std::vector<Group>& groups, const Group& group, int rank, int p) {
  std::map<std::pair<int, int>, Group> pieces;
  std::map<int, int> sent;
  std::map<int, int> received;
  const auto piece = [&](int number, int distance) -> Group& {
    return pieces[{number / kMessages, (distance + p) % p / kDistances}];
  };
  for (const Send& send : group.sends) {
    piece(sent[send.peer]++, send.peer - rank).sends.push_back(send);
  }
  for (const Recv& recv : group.recvs) {
    piece(received[recv.peer]++, rank - recv.peer).recvs.push_back(recv);
  }
  for (auto& [key, part] : pieces) groups.push_back(std::move(part));
}

}  // namespace

std::vector<Group> groupsOf(const ScheduleRequest& request, const Schedule& schedule,
                            const std::vector<bool>& elsewhere) {
  const auto goes = [&](int peer) {
    return elsewhere.empty() || !elsewhere[static_cast<size_t>(peer)];
  };
  const Times times = timesOf(request, schedule);
  std::map<size_t, Group> by_time;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    for (size_t j = 0; j < step.sends.size(); ++j) {
      if (goes(step.sends[j].peer)) by_time[times.sends[i][j]].sends.push_back(step.sends[j]);
    }
    for (size_t j = 0; j < step.recvs.size(); ++j) {
      if (goes(step.recvs[j].peer)) by_time[times.recvs[i][j]].recvs.push_back(step.recvs[j]);
    }
  }
  std::vector<Group> result;
  auto next = by_time.begin();
  for (size_t i = 0; i <= schedule.steps.size(); ++i) {  // after the last step, what was deferred
    const bool is_step = i < schedule.steps.size();
    const size_t first = result.size();
    for (; next != by_time.end() && (!is_step || next->first < times.begin[i + 1]); ++next) {
      cut(result, next->second, schedule.rank, schedule.group_size);
    }
    for (size_t g = first; g < result.size(); ++g) result[g].step = i;
  }
  return result;
}

namespace {

size_t arrivalBytes(const std::vector<Group>& groups) {
  size_t most = 0;
  for (const Group& group : groups) {
    size_t bytes = 0;
    for (const Recv& recv : group.recvs) {
      if (recv.reduce) bytes += paddedBytes(recv.to.bytes);
    }
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace

GroupPlan::GroupPlan(const ScheduleRequest& request, std::shared_ptr<const Schedule> planned,
                     const std::vector<bool>& elsewhere)
    : schedule(std::move(planned)),
      groups(groupsOf(request, *schedule, elsewhere)),
      arrivals_offset(paddedBytes(schedule->temp_bytes)),
      token_offset(arrivals_offset + arrivalBytes(groups)) {}

std::shared_ptr<const GroupPlan> GroupPlans::get(const ScheduleRequest& request,
                                                 const std::shared_ptr<const Schedule>& schedule,
                                                 std::vector<bool> elsewhere) {
  constexpr size_t kMaxPlans = 256;
  Key key(schedule.get(), std::move(elsewhere));
  if (const auto known = plans_.find(key); known != plans_.end()) return known->second;
  auto made = std::make_shared<const GroupPlan>(request, schedule, key.second);
  if (plans_.size() >= kMaxPlans) plans_.clear();
  plans_.emplace(std::move(key), made);
  return made;
}

}  // namespace hdpcomm::nccl
