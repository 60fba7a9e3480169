#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "planner/model/cost_model.hpp"
#include "planner/model/plan.hpp"
#include "planner/simulate/link_sharing.hpp"
#include "planner/simulate/pass_costs.hpp"
#include "planner/simulate/simulator.hpp"

namespace hdpcomm::planner {
namespace {

// A pass that a device may run, ordered by preference: backward passes first, then by micro-batch.
// With several chunks of the model on a device, micro-batches go through them in groups. The order
// is the same on every rank, so ranks cannot wait for each other in a circle.
struct Key {
  bool forward = true;
  int32_t group = 0;
  int32_t turn = 0;  // of the chunk: forward from the first one, backward from the last one
  int32_t micro_batch = -1;
  auto operator<=>(const Key&) const = default;
};

struct Unit {            // one device of one rank
  size_t next = 0;       // forward passes started
  double in_flight = 0;  // what passes that owe gradients take of its room
  bool running = false;
  Key forward, backward;       // the passes that it would run next, if it is idle
  double free = 0;             // when its last pass ends, in its order
  std::vector<Key> backwards;  // backward passes that may start, in their order: few at a time
  double left = 0;             // seconds of all passes that have not started
  double way_back = 0;         // of the last one, at least, to the first device
  double resident = 0;
  double peak = 0;
};

struct Event {
  double time;
  int64_t order;
  int32_t micro_batch;
  int32_t stage;
  bool backward;
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : order > other.order;
  }
};

// A pass of a ring over links that others use, too: its pace depends on who else does.
struct SharedPass {
  bool running = false;
  size_t span = 0;       // its place in the result
  double left = 0;       // share of the pass
  double since = 0;      // when `left` was that
  double seconds = 0;    // of the whole pass at the present pace
  double ring_ends = 0;  // at that pace
  double ends = 0;       // with its copies to or from the host
  double copied = 0;     // when these are done
};

class Simulator {
 public:
  // `limit`: the run ends where the step is certain not to end before it.
  Simulator(const Problem& problem, const Plan& plan, bool record = true, double limit = kNever)
      : problem_(problem),
        plan_(plan),
        limit_(limit),
        devices_(problem.cost().cluster().pipeline),
        chunks_(problem.cost().cluster().chunks),
        stages_(devices_ * chunks_),
        record_(record || stages_ == 1),
        costs_(problem, plan),
        links_(problem.cost().cluster(), plan.micro_batches),
        shared_(stages_ == 1 ? plan.micro_batches.size() : 0) {
    const size_t count = plan.micro_batches.size();
    units_.resize(static_cast<size_t>(problem.ranks()) * devices_);
    if (limit_ < kNever) findLeft();
    if (too_late_) return;
    taken_.assign(count, 1);
    findSlices();
    queueForwards();
    votes_.assign(count * stages_ * 2, 0);
    passed_.assign(count, 0);
    if (!following_.empty()) backward_ends_.assign(count * stages_, 0);
    forwards_done_.assign(count, 0);
    to_host_.assign(units_.size(), 0.0);
    from_host_.assign(units_.size(), 0.0);
    result_.begin(problem.ranks());
  }

  SimulatedStep run() {
    if (too_late_) {
      result_.finish(limit_);
      return std::move(result_);
    }
    size_t done = 0;
    double latest = 0;
    for (const std::vector<int32_t>& ranks : parts()) {
      now_ = 0;
      done += runPart(ranks);
      latest = std::max(latest, too_late_ ? limit_ : now_);
      if (too_late_) break;
    }
    const size_t all = plan_.micro_batches.size() * stages_ * 2;
    if (done != all && !too_late_) {
      throw Error(ErrorKind::kInternal, "the simulation stopped after " + std::to_string(done) +
                                            " passes: the ranks wait for each other");
    }
    result_.finish(chunks_ == 1 || too_late_ ? latest : makespan_);
    for (size_t i = 0; i < units_.size(); ++i) {
      double& peak = result_.peak_tokens[i / devices_];
      peak = std::max(peak, units_[i].peak);
    }
    return std::move(result_);
  }

 private:
  // Ranks that share no micro-batch with others run by themselves: few of them, and few events.
  // With one stage all together, as their rings may share links.
  std::vector<std::vector<int32_t>> parts() const {
    if (stages_ == 1) {
      std::vector<int32_t> all(problem_.ranks());
      std::iota(all.begin(), all.end(), 0);
      return {std::move(all)};
    }
    const std::vector<int32_t> lowest = joinedRanks(plan_, problem_.ranks());
    std::vector<std::vector<int32_t>> found(problem_.ranks());
    for (int32_t rank = 0; rank < problem_.ranks(); ++rank) found[lowest[rank]].push_back(rank);
    return found;
  }

  // Returns how many passes have ended.
  size_t runPart(const std::vector<int32_t>& ranks) {
    size_t done = 0;
    chooseAll(ranks);
    while (!too_late_) {
      if (events_.empty()) chooseAll(ranks);
      if (events_.empty()) break;
      const Event event = events_.top();
      events_.pop();
      if (changed(event)) continue;
      now_ = event.time;
      finish(event);
      ++done;
    }
    return done;
  }

  // The order of the forward passes on each device: by micro-batch; with several chunks, groups of
  // at most as many micro-batches of a rank as there are devices go through the first chunk, then
  // through the second one, and so on. A micro-batch is in the same group on all of its ranks, and
  // a rank's groups follow each other. All slices of a sequence are in one group.
  void queueForwards() {
    const size_t count = plan_.micro_batches.size();
    group_.assign(count, 0);
    std::vector<std::vector<int32_t>> own(problem_.ranks());
    queues_.resize(problem_.ranks());
    std::vector<int32_t> level(problem_.ranks(), 0);
    for (size_t i = 0; i < count; ++i) {
      const std::vector<int32_t>& ranks = plan_.micro_batches[i].ranks;
      const auto index = static_cast<int32_t>(i);
      for (const int32_t rank : ranks) own[rank].push_back(index);
      if (chunks_ == 1) continue;
      if (goesOn(index)) {
        group_[i] = group_[previous_[i]];
        continue;
      }
      int32_t most = 0;
      for (const int32_t rank : ranks) most = std::max(most, level[rank]);
      const int32_t room = devices_ - most % devices_;
      const auto taken = static_cast<int>(taken_[i]);
      if (room < taken) most += room % devices_;
      group_[i] = most / devices_;
      for (const int32_t rank : ranks) {
        level[rank] = std::min(most + taken, (group_[i] + 1) * devices_);
      }
    }
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      std::vector<Key>& queue = queues_[rank];
      queue.reserve(own[rank].size() * chunks_);
      for (const int32_t index : own[rank]) {
        for (int chunk = 0; chunk < chunks_; ++chunk) {
          queue.push_back({true, group_[index], chunk, index});
        }
      }
      if (chunks_ > 1) std::sort(queue.begin(), queue.end());
    }
  }

  void findSlices() {
    following_ = followingSlices(plan_);
    if (following_.empty()) return;
    previous_.assign(following_.size(), -1);
    for (size_t i = 0; i < following_.size(); ++i) {
      if (following_[i] >= 0) previous_[following_[i]] = static_cast<int32_t>(i);
    }
    backward_from_.assign(following_.size(), stages_);
    if (devices_ == 1) return;
    by_tokens_ = chunks_ == 1;
    const auto capacity = static_cast<double>(problem_.cost().memory().capacity);
    for (size_t i = 0; i < following_.size(); ++i) {
      double tokens = chunks_ * costs_.on(i, 0).resident;
      if (previous_[i] < 0) {
        for (int32_t k = following_[i]; k >= 0; k = following_[k]) {
          tokens += chunks_ * costs_.on(k, 0).resident;
        }
      }
      if (by_tokens_) {
        taken_[i] = tokens;
      } else if (previous_[i] < 0 && following_[i] >= 0) {
        taken_[i] = std::max(1.0, std::ceil(tokens / capacity * (1 - kRounding)));
      }
    }
  }

  // Whether a device may run one more forward pass. It has room for so many micro-batches, of which
  // the slices of a sequence are some from the first one on; with slices and one chunk for tokens,
  // on each device for as many as full micro-batches of all devices have. No device waits for ever:
  // where those before it in the order have run backward, it holds no more than what its own group
  // has on the chunks before the last one.
  bool hasRoom(const Unit& self, int device, int32_t micro_batch) const {
    if (goesOn(micro_batch)) return true;
    const double own = taken_[micro_batch];
    if (by_tokens_) {
      const auto room = static_cast<double>(devices_ * problem_.cost().memory().capacity);
      return self.in_flight < kNone || self.in_flight + own <= room * (1 + kRounding);
    }
    const double most = mostInFlight(problem_.cost().cluster(), device) - own;
    return self.in_flight <= std::max(most, (chunks_ - 1) * std::max<double>(devices_, own));
  }

  bool goesOn(int32_t micro_batch) const {
    return !previous_.empty() && previous_[micro_batch] >= 0;
  }

  // Whether the backward pass of a slice may run on this stage: it needs that of the next stage,
  // and that of the next slice.
  bool backwardReady(int32_t micro_batch, int stage) const {
    const int32_t next = following_[micro_batch];
    if (next >= 0 && backward_from_[next] > stage) return false;
    return stage + 1 == stages_ ? forwards_done_[micro_batch] == stages_
                                : backward_from_[micro_batch] <= stage + 1;
  }

  void findLeft() {
    const RankTimes times(problem_, plan_, costs_);
    too_late_ = times.leastMakespan() >= limit_;
    for (int32_t rank = 0; rank < problem_.ranks(); ++rank) {
      for (int device = 0; device < devices_; ++device) {
        unit(rank, device).left = times.busy(rank, device);
        unit(rank, device).way_back = times.wayBack(rank, device);
      }
    }
  }

  // At the start, and where release() has not found all that wait for each other. As no device runs
  // anything then, the first backward pass of all that may start has all of its ranks.
  void chooseAll(const std::vector<int32_t>& ranks) {
    for (const bool forward : {true, false}) {
      for (const int32_t rank : ranks) {
        for (int device = 0; device < devices_; ++device) choose(rank, device, forward);
      }
    }
  }

  int stageOf(const Key& key, int device) const {
    return (key.forward ? key.turn : chunks_ - 1 - key.turn) * devices_ + device;
  }

  Unit& unit(int rank, int device) { return units_[static_cast<size_t>(rank) * devices_ + device]; }
  int& votes(const Key& key, int stage) {
    return votes_[(static_cast<size_t>(key.micro_batch) * stages_ + stage) * 2 + key.forward];
  }

  // Chooses the forward or backward pass that an idle device would run next. Its vote moves when a
  // better pass becomes possible; a pass starts once all ranks of its group have voted for it.
  void choose(int rank, int device, bool forward) {
    Unit& self = unit(rank, device);
    if (self.running) return;
    Key best;
    if (!forward) {
      if (!self.backwards.empty() && runsBackward(self, device)) best = self.backwards.front();
    } else if (chunks_ > 1 || self.backwards.empty()) {
      const std::vector<Key>& queue = queues_[rank];
      if (self.next < queue.size() && hasRoom(self, device, queue[self.next].micro_batch)) {
        const Key& next = queue[self.next];
        if (forwards_done_[next.micro_batch] >= stageOf(next, device)) best = next;
      }
    }
    Key& last = forward ? self.forward : self.backward;
    if (best == last) return;
    withdraw(last, device);
    last = best;
    if (best.micro_batch < 0) return;
    const size_t group = plan_.micro_batches[best.micro_batch].ranks.size();
    const int stage = stageOf(best, device);
    if (++votes(best, stage) == static_cast<int>(group)) start(best, stage);
  }

  void withdraw(Key& key, int device) {
    if (key.micro_batch >= 0) --votes(key, stageOf(key, device));
    key = Key{};
  }

  // Several chunks prefer forward passes, as long as few enough are in flight: a device waits for
  // the ranks of its next one while any of these is busy.
  bool runsBackward(const Unit& self, int device) {
    if (chunks_ == 1 || self.forward.micro_batch < 0) return true;
    const std::vector<int32_t>& ranks = plan_.micro_batches[self.forward.micro_batch].ranks;
    return std::none_of(ranks.begin(), ranks.end(),
                        [&](int32_t rank) { return unit(rank, device).running; });
  }

  // A device has become idle and waits: lets those run backward that wait for it with one of its
  // next forward passes.
  void release(int32_t rank, int device) {
    const Unit& self = unit(rank, device);
    const std::vector<Key>& queue = queues_[rank];
    const size_t end = std::min(queue.size(), self.next + 4 * static_cast<size_t>(devices_));
    for (size_t i = self.next; i < end && !self.running; ++i) {
      if (votes(queue[i], stageOf(queue[i], device)) == 0) continue;
      for (const int32_t member : plan_.micro_batches[queue[i].micro_batch].ranks) {
        choose(member, device, false);
      }
    }
  }

  void start(const Key& key, int stage) {
    const MicroBatch& batch = plan_.micro_batches[key.micro_batch];
    const PassCosts& cost = costs_.on(key.micro_batch, stage);
    const PassCosts::Pass& pass = key.forward ? cost.forward : cost.backward;
    const int device = stage % devices_;
    const double now = startInOrder(key, stage);
    double end = now + pass.seconds;
    double stall = 0;
    double copied = 0;
    const bool shared = sharesLinks(key.micro_batch);
    if (limit_ < kNever) {  // all later passes of the micro-batch wait for this one
      const auto [forward, backward] = costs_.shortest(key.micro_batch);
      const double way =
          key.forward ? (stages_ - stage) * forward + stages_ * backward : (stage + 1) * backward;
      too_late_ = too_late_ || (now + way) * (1 - kRounding) > limit_;
    }
    std::vector<double>& stream = key.forward ? to_host_ : from_host_;
    if (cost.copy > 0) {
      for (const int32_t rank : batch.ranks) {
        double& free = stream[static_cast<size_t>(rank) * devices_ + device];
        free = std::max(free, now) + cost.copy;
        copied = std::max(copied, free);
      }
      stall = std::max(0.0, copied - end);
      end += stall;
    }
    for (const int32_t rank : batch.ranks) {
      Unit& member = unit(rank, device);
      member.running = true;
      withdraw(member.forward, device);
      withdraw(member.backward, device);
      member.free = end;
      if (key.forward) {
        ++member.next;
        if (!goesOn(key.micro_batch)) member.in_flight += taken_[key.micro_batch];
        member.resident += cost.resident;
        member.peak = std::max(member.peak, member.resident);
      } else {
        member.backwards.erase(
            std::lower_bound(member.backwards.begin(), member.backwards.end(), key));
      }
      if (limit_ < kNever) {
        const double least = now + member.left + member.way_back;
        too_late_ = too_late_ || least * (1 - kRounding) > limit_;
        member.left -= pass.seconds;
      }
      if (!record_) continue;
      result_.busy[rank] += pass.seconds - pass.exposed;
      if (shared) continue;  // finishShared() knows the rest
      result_.exposed[rank] += pass.exposed;
      result_.stalled[rank] += stall;
    }
    if (!key.forward && !following_.empty()) backwardEnd(key.micro_batch, stage) = end;
    ++started_;
    if (record_) result_.spans.push_back({key.micro_batch, stage, !key.forward, now, end});
    passed_[key.micro_batch] = end;
    makespan_ = std::max(makespan_, end);
    if (shared) {
      startShared(key.micro_batch, pass, copied);
    } else {
      events_.push({now_ + (end - now), started_, key.micro_batch, stage, !key.forward});
    }
  }

  // When a pass starts in the order that was chosen: when its devices have run what they run before
  // it, and its inputs are there. With several chunks that may be before now, as a device chooses
  // later than it could start.
  double startInOrder(const Key& key, int stage) {
    if (chunks_ == 1) return now_;
    double start = passed_[key.micro_batch];
    if (!key.forward && !following_.empty() && following_[key.micro_batch] >= 0) {
      start = std::max(start, backwardEnd(following_[key.micro_batch], stage));
    }
    for (const int32_t rank : plan_.micro_batches[key.micro_batch].ranks) {
      start = std::max(start, unit(rank, stage % devices_).free);
    }
    return start;
  }

  double& backwardEnd(int32_t micro_batch, int stage) {
    return backward_ends_[static_cast<size_t>(micro_batch) * stages_ + stage];
  }

  // Pipelines fill their gaps by other orders than this one, in which no pace changes.
  bool sharesLinks(int32_t micro_batch) const { return stages_ == 1 && links_.uses(micro_batch); }

  // Whether the event is the end of a pass that has another one by now.
  bool changed(const Event& event) const {
    if (!sharesLinks(event.micro_batch)) return false;
    const SharedPass& pass = shared_[event.micro_batch];
    return !pass.running || event.time != pass.ends ||
           static_cast<size_t>(event.order) != pass.span + 1;
  }

  void startShared(int32_t micro_batch, const PassCosts::Pass& pass, double copied) {
    const double step = std::max(pass.compute, pass.bytes + pass.latency);
    Flow flow;
    if (step > 0) flow.demand = pass.bytes / step;
    if (pass.seconds > 0) flow.present = std::min(1.0, pass.steps * step / pass.seconds);
    links_.start(micro_batch, flow);
    shared_[micro_batch] = {true, result_.spans.size() - 1, 1, now_, 0, 0, 0, copied};
    changePaces(micro_batch);
  }

  // Makes all passes that share a link with this one go on at the pace which it leaves them.
  void changePaces(int32_t micro_batch) {
    for (const int32_t other : links_.beside(micro_batch)) {
      SharedPass& own = shared_[other];
      const bool backward = result_.spans[own.span].backward;
      const PassCosts& costs = costs_.on(other, 0);
      const PassCosts::Pass& pass = backward ? costs.backward : costs.forward;
      if (own.seconds > 0) own.left -= (now_ - own.since) / own.seconds;
      own.left = std::max(0.0, own.left);
      own.since = now_;
      own.seconds = pass.secondsAt(links_.slowdown(other));
      own.ring_ends = now_ + own.left * own.seconds;
      own.ends = std::max(own.ring_ends, own.copied);
      events_.push({own.ends, static_cast<int64_t>(own.span) + 1, other, 0, backward});
    }
  }

  void finishShared(const Event& event) {
    SharedPass& own = shared_[event.micro_batch];
    own.running = false;
    links_.finish(event.micro_batch);
    Span& span = result_.spans[own.span];
    span.end = event.time;
    const PassCosts& costs = costs_.on(event.micro_batch, 0);
    const PassCosts::Pass& pass = event.backward ? costs.backward : costs.forward;
    const double exposed = own.ring_ends - span.start - (pass.seconds - pass.exposed);
    for (const int32_t rank : plan_.micro_batches[event.micro_batch].ranks) {
      result_.exposed[rank] += std::max(0.0, exposed);
      result_.stalled[rank] += event.time - own.ring_ends;
    }
    changePaces(event.micro_batch);
  }

  void finish(const Event& event) {
    const MicroBatch& batch = plan_.micro_batches[event.micro_batch];
    const int device = event.stage % devices_;
    if (sharesLinks(event.micro_batch)) finishShared(event);
    for (const int32_t rank : batch.ranks) {
      Unit& member = unit(rank, device);
      member.running = false;
      if (event.backward) {
        if (!goesOn(event.micro_batch)) member.in_flight -= taken_[event.micro_batch];
        member.resident -= costs_.on(event.micro_batch, event.stage).resident;
        const double end = chunks_ == 1 ? event.time : member.free;
        result_.end[rank] = std::max(result_.end[rank], end);
      }
    }
    int wakes = -1;  // stage on which the next pass of this micro-batch may start now
    if (!event.backward) {
      forwards_done_[event.micro_batch] = event.stage + 1;
      wakes = std::min(event.stage + 1, stages_ - 1);
      if (event.stage + 1 == stages_) allowBackward(event.micro_batch, event.stage);
    } else {
      if (!following_.empty()) {
        backward_from_[event.micro_batch] = event.stage;
        const int32_t previous = previous_[event.micro_batch];
        if (previous >= 0) allowBackward(previous, event.stage);
      }
      if (event.stage > 0) {
        wakes = event.stage - 1;
        allowBackward(event.micro_batch, wakes);
      }
    }
    const int other = wakes >= 0 ? wakes % devices_ : device;
    const auto chooseHere = [&](int32_t rank, bool forward) {
      choose(rank, device, forward);
      if (chunks_ == 1 && forward) choose(rank, device, false);
      if (other == device) return;
      choose(rank, other, forward);
      if (chunks_ == 1 && forward) choose(rank, other, false);
    };
    for (const int32_t rank : batch.ranks) chooseHere(rank, true);
    if (chunks_ == 1) return;
    for (const int32_t rank : batch.ranks) chooseHere(rank, false);
    for (const int32_t rank : batch.ranks) release(rank, device);
  }

  void allowBackward(int32_t micro_batch, int stage) {
    if (!following_.empty() && !backwardReady(micro_batch, stage)) return;
    const Key key{false, group_[micro_batch], chunks_ - 1 - stage / devices_, micro_batch};
    for (const int32_t rank : plan_.micro_batches[micro_batch].ranks) {
      std::vector<Key>& backwards = unit(rank, stage % devices_).backwards;
      backwards.insert(std::upper_bound(backwards.begin(), backwards.end(), key), key);
    }
  }

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr double kRounding = 1e-9;  // of sums
  static constexpr double kNone = 1e-6;      // tokens, by rounding

  const Problem& problem_;
  const Plan& plan_;
  const double limit_;
  const int devices_;  // of each rank's pipeline
  const int chunks_;   // stages on each device
  const int stages_;   // of the model: stage s is on device s % devices_
  const bool record_;  // more than the makespan
  bool too_late_ = false;
  double now_ = 0;
  const PlanCosts costs_;
  std::vector<int32_t> group_;            // by micro-batch; see queueForwards()
  std::vector<std::vector<Key>> queues_;  // by rank: forward passes in their order
  std::vector<Unit> units_;
  std::vector<int> votes_;  // by micro-batch, stage and pass: ranks that chose it
  // By micro-batch: slices before and after it, and the lowest stage whose backward pass has ended.
  // Empty where there are no slices.
  std::vector<int32_t> following_, previous_, backward_from_;
  std::vector<double> passed_;         // by micro-batch: when its last pass so far ends
  std::vector<double> backward_ends_;  // by micro-batch and stage, where there are slices
  double makespan_ = 0;                // of passes that no links make slower
  std::vector<double> taken_;       // by micro-batch: of a device's room, while it owes gradients
  bool by_tokens_ = false;          // that is in tokens
  std::vector<int> forwards_done_;  // by micro-batch: stages whose forward pass is done
  LinkSharing links_;
  std::vector<SharedPass> shared_;  // by micro-batch
  std::vector<double> to_host_;     // by unit: when its copy stream is free
  std::vector<double> from_host_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  int64_t started_ = 0;  // passes
  SimulatedStep result_;
};

}  // namespace

// Passes whose backward pass a device has yet to run, at most. With several chunks, as many as keep
// it busy until the first gradient comes back; (chunks - 1) * devices + 1 are enough for the first
// micro-batch of a group to reach the last stage, so no device waits for ever.
int mostInFlight(const Cluster& cluster, int device) noexcept {
  const int devices = cluster.pipeline;
  return cluster.chunks == 1 ? devices - device
                             : 2 * (devices - device - 1) + (cluster.chunks - 1) * devices + 1;
}

SimulatedStep simulatePriorities(const Problem& problem, const Plan& plan) {
  return Simulator(problem, plan).run();
}

double makespanByPriorities(const Problem& problem, const Plan& plan, double limit) {
  return Simulator(problem, plan, false, limit).run().makespan;
}

}  // namespace hdpcomm::planner
