#include "comm/host/deadlock.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>

namespace hdpcomm {
namespace {

constexpr size_t kNamed = 5;  // ranks whose calls the message tells

bool awaitsOneOf(const WaitingWork& work, const auto& ranks) {
  return std::any_of(work.awaited, work.awaited + work.num_awaited,
                     [&](int rank) { return ranks.contains(rank); });
}

// A record is memory that another process writes.
bool wellFormed(const WaitRecord& record, int num_ranks) {
  if (record.num_works > WaitRecord::kWorks) return false;
  return std::all_of(record.works, record.works + record.num_works, [&](const WaitingWork& work) {
    return work.num_awaited >= 0 && work.num_awaited <= WaitingWork::kRanks &&
           std::all_of(work.awaited, work.awaited + work.num_awaited,
                       [&](int rank) { return rank >= 0 && rank < num_ranks; });
  });
}

// "rank 0 waits for rank 1 to send in send/recv(4 x float32) on 2 ranks"
std::string describeWait(int rank, const WaitRecord& record) {
  const WaitingWork& work = record.works[0];
  const std::vector<int> awaited(work.awaited, work.awaited + work.num_awaited);
  std::string text = "rank " + std::to_string(rank) + " waits for rank" +
                     (awaited.size() > 1 ? "s " : " ") + listOf(awaited);
  if (work.call.op == OpCode::kPointToPoint && work.sends != work.receives) {
    text += work.sends != 0 ? " to receive" : " to send";
  }
  return text + " in " + describe(work.call);
}

}  // namespace

DeadlockFinder::DeadlockFinder(Transport& transport)
    : transport_(transport),
      rank_(transport.rank()),
      own_(transport.waitPlace(rank_)),
      told_(static_cast<size_t>(transport.size())) {}

void DeadlockFinder::begin() {
  if (own_ == nullptr) return;
  // Release and acquire: what a rank reads in a check was there when it began.
  own_->begun.fetch_add(1, std::memory_order_acq_rel);
}

std::optional<Error> DeadlockFinder::end(const WaitRecord& record) {
  if (own_ == nullptr) return std::nullopt;
  if (std::memcmp(&record, &published_, sizeof record) != 0) {
    published_ = record;
    own_->record.write(record);
  }
  // Release: who sees that this check has ended sees its record.
  own_->ended.store(own_->begun.load(std::memory_order_relaxed), std::memory_order_release);
  if (record.num_works == 0) {
    suspects_.clear();
    return std::nullopt;
  }
  if (auto told = deadlockFoundByOthers()) return told;
  Blocked now = stuck(record);
  if (confirmed(now)) return publish(now);
  const bool same = std::equal(
      now.begin(), now.end(), suspects_.begin(), suspects_.end(), [](const auto& a, const auto& b) {
        return a.first == b.first && a.second.record.signature == b.second.record.signature;
      });
  if (!same) suspects_ = std::move(now);
  return std::nullopt;
}

// Reads what another rank waits for; false: it is not blocked, or unknown.
bool DeadlockFinder::look(int rank, Seen& seen) const {
  const WaitPlace* place = transport_.waitPlace(rank);
  if (place == nullptr || !place->record.read(seen.record)) return false;
  if (seen.record.num_works == 0 || !wellFormed(seen.record, transport_.size())) return false;
  // After the record: a check that begins later has not begun when the record was read.
  seen.begun = place->begun.load(std::memory_order_acquire);
  return true;
}

// The ranks on which this one waits, directly or not, and that seem to be stuck, with this one;
// empty if it is not.
DeadlockFinder::Blocked DeadlockFinder::stuck(const WaitRecord& own) const {
  Blocked found{{rank_, {own, 0}}};
  std::deque<int> open{rank_};
  for (; !open.empty(); open.pop_front()) {
    const WaitRecord record = found.at(open.front()).record;
    for (uint64_t i = 0; i < record.num_works; ++i) {
      for (int j = 0; j < record.works[i].num_awaited; ++j) {
        const int rank = record.works[i].awaited[j];
        Seen seen;
        if (found.contains(rank) || !look(rank, seen)) continue;
        found.emplace(rank, seen);
        open.push_back(rank);
      }
    }
  }
  const auto goesOn = [&](const auto& each) {
    const WaitRecord& record = each.second.record;
    return std::any_of(record.works, record.works + record.num_works,
                       [&](const WaitingWork& work) { return !awaitsOneOf(work, found); });
  };
  while (std::erase_if(found, goesOn) > 0) {
  }
  if (!found.contains(rank_)) found.clear();
  return found;
}

bool DeadlockFinder::confirmed(const Blocked& now) const {
  if (now.empty()) return false;
  return std::all_of(now.begin(), now.end(), [&](const auto& each) {
    const auto before = suspects_.find(each.first);
    if (before == suspects_.end()) return false;
    const Seen& then = before->second;
    if (then.record.signature != each.second.record.signature) return false;
    if (each.first == rank_) return true;
    const WaitPlace* place = transport_.waitPlace(each.first);
    // Acquire: the record that is read next is that of a check which has ended.
    if (place->ended.load(std::memory_order_acquire) <= then.begun) return false;
    WaitRecord record;
    return place->record.read(record) && record.num_works > 0 &&
           record.signature == then.record.signature;
  });
}

std::optional<Error> DeadlockFinder::deadlockFoundByOthers() {
  if (published_.num_works == 0) return std::nullopt;
  for (int rank = 0; rank < transport_.size(); ++rank) {
    const WaitPlace* place = rank == rank_ ? nullptr : transport_.waitPlace(rank);
    if (place == nullptr) continue;
    const uint64_t count = place->deadlock.count();
    uint64_t& told = told_[static_cast<size_t>(rank)];
    Deadlock deadlock;
    if (count == told || !place->deadlock.read(deadlock)) continue;
    told = count;
    const auto end =
        deadlock.members + std::min<uint64_t>(deadlock.num_members, Deadlock::kMembers);
    const bool member = std::any_of(deadlock.members, end, [&](const Deadlock::Member& each) {
      return each.rank == static_cast<uint64_t>(rank_) && each.signature == published_.signature;
    });
    if (member) return error(readText(deadlock.text, sizeof deadlock.text));
  }
  return std::nullopt;
}

Error DeadlockFinder::publish(const Blocked& members) {
  std::vector<int> ranks;
  std::string calls;
  Deadlock deadlock{};
  for (const auto& [rank, seen] : members) {
    if (deadlock.num_members < Deadlock::kMembers) {
      deadlock.members[deadlock.num_members++] = {static_cast<uint64_t>(rank),
                                                  seen.record.signature};
    }
    if (ranks.size() < kNamed)
      calls += (calls.empty() ? "" : ", ") + describeWait(rank, seen.record);
    ranks.push_back(rank);
  }
  const std::string text = (ranks.size() == 1 ? "rank " + listOf(ranks) + " waits for itself"
                                              : "ranks " + listOf(ranks) + " wait for each other") +
                           " and cannot go on: " + calls + (ranks.size() > kNamed ? ", ..." : "") +
                           ": call the same operations with the same arguments in the same order";
  writeText(deadlock.text, sizeof deadlock.text, text);
  own_->deadlock.write(deadlock);
  suspects_.clear();
  return error(deadlock.text);
}

Error DeadlockFinder::error(const std::string& text) const {
  const WaitingWork& work = published_.works[0];
  return Error(ErrorKind::kMismatch, text,
               {.rank = rank_,
                .peer = work.num_awaited > 0 ? work.awaited[0] : -1,
                .op = {},
                .ranks = {},
                .seq = -1});
}

}  // namespace hdpcomm
