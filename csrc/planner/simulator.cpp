#include "planner/simulator.hpp"

#include <algorithm>
#include <queue>
#include <set>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::planner {
namespace {

// One pass of a micro-batch through one stage.
struct Pass {
  double seconds = 0;
  double exposed = 0;  // part of `seconds` that waits for KV
};

struct Cost {
  Pass forward, backward;
  double copy = 0;      // seconds of the copies to host memory, and again of those back
  double resident = 0;  // tokens that stay on the device
};

// A pass that a stage may run, ordered by preference: backward passes first, then by micro-batch.
// The order is the same on every rank, so ranks cannot wait for each other in a circle.
struct Key {
  bool forward = true;
  int32_t micro_batch = -1;
  auto operator<=>(const Key&) const = default;
};

struct Unit {                  // one stage of one rank
  std::vector<int32_t> queue;  // micro-batches of the rank
  size_t next = 0;             // forward passes started
  int in_flight = 0;
  bool running = false;
  Key choice;                   // the pass that it would run next, if it is idle
  std::set<int32_t> backwards;  // micro-batches whose backward pass may start
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

class Simulator {
 public:
  Simulator(const Problem& problem, const Plan& plan)
      : problem_(problem), plan_(plan), stages_(problem.cost().cluster().pipeline) {
    const size_t count = plan.micro_batches.size();
    costs_.reserve(count);
    for (const MicroBatch& batch : plan.micro_batches) costs_.push_back(costOf(batch));
    units_.resize(static_cast<size_t>(problem.ranks()) * stages_);
    for (size_t i = 0; i < count; ++i) {
      for (const int32_t rank : plan.micro_batches[i].ranks) {
        for (int stage = 0; stage < stages_; ++stage) {
          unit(rank, stage).queue.push_back(static_cast<int32_t>(i));
        }
      }
    }
    votes_.assign(count * stages_ * 2, 0);
    forwards_done_.assign(count, 0);
    to_host_.assign(units_.size(), 0.0);
    from_host_.assign(units_.size(), 0.0);
    for (auto* values :
         {&result_.busy, &result_.exposed, &result_.stalled, &result_.end, &result_.peak_tokens}) {
      values->assign(problem.ranks(), 0.0);
    }
  }

  SimulatedStep run() {
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      for (int stage = 0; stage < stages_; ++stage) choose(rank, stage);
    }
    size_t done = 0;
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      finish(event);
      ++done;
    }
    if (done != plan_.micro_batches.size() * stages_ * 2) {
      throw Error(ErrorKind::kInternal, "the simulation stopped after " + std::to_string(done) +
                                            " passes: the ranks wait for each other");
    }
    result_.makespan = now_;
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      for (int stage = 0; stage < stages_; ++stage) {
        result_.peak_tokens[rank] = std::max(result_.peak_tokens[rank], unit(rank, stage).peak);
      }
    }
    return std::move(result_);
  }

 private:
  Cost costOf(const MicroBatch& batch) const {
    const CostModel& cost = problem_.cost();
    const CostParams& params = cost.params();
    const MemoryParams& memory = cost.memory();
    const int size = static_cast<int>(batch.ranks.size());
    Load load;
    int64_t held = 0;
    for (const int32_t sequence : batch.sequences) {
      const int64_t length = problem_.lengths()[sequence];
      load += problem_.own(sequence);
      held += (length + size - 1) / size;
    }
    const bool one_node = onOneNode(batch.ranks, cost.cluster());
    const double step = cost.stepCompute(load, size);
    const double transfer = cost.stepTransfer(load, size, one_node);
    const double rest =
        params.linear * load.tokens / size + params.fixed + (size - 1) * params.ring_step;
    const auto pass = [&](double share, double step_wait) {
      const double wait = (size - 1) * step_wait;
      return Pass{share * (size * step + rest) + wait, wait};
    };
    Cost result;
    result.forward = pass(params.forward, cost.forwardWait(step, transfer));
    result.backward = pass(1 - params.forward, cost.backwardWait(step, transfer));
    const double tokens = static_cast<double>(held);
    result.copy = batch.offload * memory.copy * tokens;
    result.resident = tokens * (1 - batch.offload * memory.offloadable);
    return result;
  }

  Unit& unit(int rank, int stage) { return units_[static_cast<size_t>(rank) * stages_ + stage]; }
  int& votes(const Key& key, int stage) {
    return votes_[(static_cast<size_t>(key.micro_batch) * stages_ + stage) * 2 + key.forward];
  }

  // Chooses what an idle stage would run next. Its vote moves when a better pass becomes possible;
  // a pass starts once all ranks of its group have voted for it.
  void choose(int rank, int stage) {
    Unit& self = unit(rank, stage);
    if (self.running) return;
    Key best;
    if (!self.backwards.empty()) {
      best = {false, *self.backwards.begin()};
    } else if (self.next < self.queue.size() && self.in_flight < stages_ - stage &&
               forwards_done_[self.queue[self.next]] >= stage) {
      best = {true, self.queue[self.next]};
    }
    if (best == self.choice) return;
    if (self.choice.micro_batch >= 0) --votes(self.choice, stage);
    self.choice = best;
    if (best.micro_batch < 0) return;
    const size_t group = plan_.micro_batches[best.micro_batch].ranks.size();
    if (++votes(best, stage) == static_cast<int>(group)) start(best, stage);
  }

  void start(const Key& key, int stage) {
    const MicroBatch& batch = plan_.micro_batches[key.micro_batch];
    const Cost& cost = costs_[key.micro_batch];
    const Pass& pass = key.forward ? cost.forward : cost.backward;
    double end = now_ + pass.seconds;
    double stall = 0;
    std::vector<double>& stream = key.forward ? to_host_ : from_host_;
    if (cost.copy > 0) {
      double copied = 0;
      for (const int32_t rank : batch.ranks) {
        double& free = stream[static_cast<size_t>(rank) * stages_ + stage];
        free = std::max(free, now_) + cost.copy;
        copied = std::max(copied, free);
      }
      stall = std::max(0.0, copied - end);
      end += stall;
    }
    for (const int32_t rank : batch.ranks) {
      Unit& member = unit(rank, stage);
      member.running = true;
      member.choice = Key{};
      if (key.forward) {
        ++member.next;
        ++member.in_flight;
        member.resident += cost.resident;
        member.peak = std::max(member.peak, member.resident);
      } else {
        member.backwards.erase(key.micro_batch);
      }
      result_.busy[rank] += pass.seconds - pass.exposed;
      result_.exposed[rank] += pass.exposed;
      result_.stalled[rank] += stall;
    }
    votes(key, stage) = 0;
    result_.spans.push_back({key.micro_batch, stage, !key.forward, now_, end});
    events_.push(
        {end, static_cast<int64_t>(result_.spans.size()), key.micro_batch, stage, !key.forward});
  }

  void finish(const Event& event) {
    const MicroBatch& batch = plan_.micro_batches[event.micro_batch];
    for (const int32_t rank : batch.ranks) {
      Unit& member = unit(rank, event.stage);
      member.running = false;
      if (event.backward) {
        --member.in_flight;
        member.resident -= costs_[event.micro_batch].resident;
        result_.end[rank] = std::max(result_.end[rank], event.time);
      }
    }
    int wakes = -1;  // stage on which the next pass of this micro-batch may start now
    if (!event.backward) {
      forwards_done_[event.micro_batch] = event.stage + 1;
      wakes = std::min(event.stage + 1, stages_ - 1);
      if (event.stage + 1 == stages_) allowBackward(event.micro_batch, event.stage);
    } else if (event.stage > 0) {
      wakes = event.stage - 1;
      allowBackward(event.micro_batch, wakes);
    }
    for (const int32_t rank : batch.ranks) {
      choose(rank, event.stage);
      if (wakes >= 0 && wakes != event.stage) choose(rank, wakes);
    }
  }

  void allowBackward(int32_t micro_batch, int stage) {
    for (const int32_t rank : plan_.micro_batches[micro_batch].ranks) {
      unit(rank, stage).backwards.insert(micro_batch);
    }
  }

  const Problem& problem_;
  const Plan& plan_;
  const int stages_;
  double now_ = 0;
  std::vector<Cost> costs_;
  std::vector<Unit> units_;
  std::vector<int> votes_;          // by micro-batch, stage and pass: ranks that chose it
  std::vector<int> forwards_done_;  // by micro-batch: stages whose forward pass is done
  std::vector<double> to_host_;     // by unit: when its copy stream is free
  std::vector<double> from_host_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  SimulatedStep result_;
};

}  // namespace

SimulatedStep simulate(const Problem& problem, const Plan& plan) {
  return Simulator(problem, plan).run();
}

}  // namespace hdpcomm::planner
