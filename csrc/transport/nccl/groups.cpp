#include "groups.hpp"

#include <algorithm>
#include <map>

namespace hdpcomm::nccl {
namespace {

// By peer: in which steps `schedule` receives from it, one entry a message.
std::vector<size_t> receivingSteps(const Schedule& schedule, int peer) {
  std::vector<size_t> steps;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    for (const Recv& recv : schedule.steps[i].recvs) {
      if (recv.peer == peer) steps.push_back(i);
    }
  }
  return steps;
}

bool hasDeferred(const Schedule& schedule) {
  for (const Step& step : schedule.steps) {
    for (const Send& send : step.sends) {
      if (send.deferred) return true;
    }
  }
  return false;
}

// A group has at most this many distances of partners, and messages of a pair: each message counts
// once a side.
constexpr int kDistances = 32;
constexpr int kMessages = 4;
static_assert(2 * kDistances * kMessages <= kMaxGroup);

// Cuts a group so that both ends of a message put it in the same piece, whatever else they have: by
// its number on the pair and by the distance from the sender to the receiver.
void cut(std::vector<Group>& groups, Group group, int rank, int p) {
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
  if (pieces.empty()) pieces[{0, 0}];
  pieces.begin()->second.moves = std::move(group.moves);
  for (auto& [key, part] : pieces) groups.push_back(std::move(part));
}

}  // namespace

std::vector<Group> groupsOf(const ScheduleRequest& request, const Schedule& schedule) {
  std::vector<Group> groups(schedule.steps.size());
  const bool deferred = hasDeferred(schedule);
  std::map<int, std::vector<size_t>> takes;  // by peer: the steps in which it takes our messages
  std::map<int, size_t> sent;                // messages to the peer so far
  std::map<int, size_t> latest;              // the group of the last of them
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    const Step& step = schedule.steps[i];
    groups[i].moves.insert(groups[i].moves.end(), step.moves.begin(), step.moves.end());
    groups[i].recvs = step.recvs;
    for (const Send& send : step.sends) {
      size_t place = i;
      if (deferred) {
        auto found = takes.find(send.peer);
        if (found == takes.end()) {
          ScheduleRequest theirs = request;
          theirs.rank = send.peer;
          theirs.algorithm = schedule.algorithm;
          found =
              takes.emplace(send.peer, receivingSteps(makeSchedule(theirs), schedule.rank)).first;
        }
        const size_t number = sent[send.peer]++;
        if (send.deferred) place = std::max(i, found->second.at(number));
      }
      place = std::max(place, latest[send.peer]);
      latest[send.peer] = place;
      if (place >= groups.size()) groups.resize(place + 1);
      groups[place].sends.push_back(send);
    }
  }
  std::vector<Group> result;
  for (Group& group : groups) cut(result, std::move(group), schedule.rank, schedule.group_size);
  return result;
}

}  // namespace hdpcomm::nccl
