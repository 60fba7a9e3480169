#include "hdpcomm/collective/checker.hpp"

#include <algorithm>
#include <bitset>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>

namespace hdpcomm {
namespace {

constexpr int kMaxGroup = 128;

struct Value {
  int64_t element = -1;  // -1: nothing there
  std::bitset<kMaxGroup> from;
  int scaled = 0;
  bool operator==(const Value&) const = default;
};

using Values = std::vector<Value>;

// Plants a mistake; returns false where the schedule has no place for it.
bool plant(Fault fault, Schedule& schedule) {
  auto& steps = schedule.steps;
  const auto first = [&](auto member) {
    return std::find_if(steps.begin(), steps.end(),
                        [&](Step& step) { return !(step.*member).empty(); });
  };
  const auto sending = first(&Step::sends);
  const auto receiving = first(&Step::recvs);
  switch (fault) {
    case Fault::kNone:
      return true;
    case Fault::kDropSend:
      if (sending != steps.end()) sending->sends.pop_back();
      return sending != steps.end();
    case Fault::kDropRecv:
      if (receiving != steps.end()) receiving->recvs.pop_back();
      return receiving != steps.end();
    case Fault::kCopyForReduce:
      if (receiving == steps.end() || !receiving->recvs[0].reduce) return false;
      receiving->recvs[0].reduce = false;
      return true;
    case Fault::kShiftRecv:
      if (receiving == steps.end() || receiving->recvs[0].to.offset == 0) return false;
      --receiving->recvs[0].to.offset;
      return true;
    case Fault::kBlockingSends: {
      bool any = false;
      for (Step& step : steps) {
        for (Send& send : step.sends) any |= std::exchange(send.deferred, false);
      }
      return any;
    }
    case Fault::kSwapSteps:
      if (steps.size() < 2) return false;
      std::swap(steps[0], steps[1]);
      return true;
  }
  return false;
}

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One rank's part of one operation. All offsets are elements of one byte: the request's
// element_bytes is 1.
class Part {
 public:
  Part(const CheckedOperation& operation, int group_rank, Fault fault)
      : operation_(operation), rank_(group_rank) {
    ScheduleRequest request = operation.request;
    request.group_size = static_cast<int>(operation.ranks.size());
    request.rank = group_rank;
    request.element_bytes = 1;
    schedule_ = makeSchedule(request);
    if (!plant(fault, schedule_))
      throw std::invalid_argument("the schedule has no place for the fault");
    layOut(request);
  }

  const Schedule& schedule() const { return schedule_; }

  Value& at(const Span& span, size_t i) {
    const size_t offset = span.offset + i;
    if (offset >= sizes_[index(span)])
      throw Failure("a span ends outside its buffer" + where(span));
    return memory_[index(span)][base_[index(span)] + offset];
  }

  Values read(const Span& span) {
    Values values(span.bytes);
    for (size_t i = 0; i < span.bytes; ++i) {
      values[i] = at(span, i);
      if (values[i].element < 0) throw Failure("reads what has not arrived" + where(span));
    }
    return values;
  }

  void write(const Span& to, const Values& values) {
    if (to.buffer == Buffer::kIn) throw Failure("writes to its input" + where(to));
    if (to.bytes != values.size()) throw Failure("sizes differ" + where(to));
    for (size_t i = 0; i < values.size(); ++i) at(to, i) = values[i];
  }

  void reduce(const Span& to, const Span& operand, const Values& message) {
    Values values = read(operand);
    if (values.size() != message.size()) throw Failure("sizes differ" + where(to));
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].element != message[i].element)
        throw Failure("adds different elements" + where(to));
      if ((values[i].from & message[i].from).any())
        throw Failure("adds a contribution twice" + where(to));
      values[i].from |= message[i].from;
    }
    write(to, values);
  }

  void move(const Move& move) {
    if (move.kind == MoveKind::kCopy) {
      write(move.to, read(move.from));
    } else if (move.kind == MoveKind::kReduce) {
      reduce(move.to, move.to, read(move.from));
    } else {
      Values values = read(move.to);
      for (Value& value : values) ++value.scaled;
      write(move.to, values);
    }
  }

  // Throws unless every element that the operation promises is there.
  void checkResult() {
    const ScheduleRequest& request = operation_.request;
    const int p = static_cast<int>(operation_.ranks.size());
    const auto count = static_cast<int64_t>(request.count);
    std::bitset<kMaxGroup> all;
    for (int i = 0; i < p; ++i) all.set(i);
    const auto one = [](int rank) { return std::bitset<kMaxGroup>().set(rank); };
    const auto expect = [&](int64_t i, int64_t element, const std::bitset<kMaxGroup>& from,
                            bool scaled) {
      const Value& value = at({Buffer::kOut, 0, 0}, static_cast<size_t>(i));
      if (value.element != element || value.from != from ||
          (p > 1 && value.scaled != (scaled ? 1 : 0))) {
        throw Failure("ends with a wrong value at element " + std::to_string(i) + " (" +
                      std::to_string(value.from.count()) + " contributions of " +
                      std::to_string(from.count()) + ")");
      }
    };
    const bool average = request.average;
    int64_t offset = 0;
    switch (request.op) {
      case OpCode::kBarrier:
        return;
      case OpCode::kAllGather:
      case OpCode::kGather:
        if (request.op == OpCode::kGather && rank_ != request.root) return;
        for (int64_t i = 0; i < p * count; ++i)
          expect(i, i, one(static_cast<int>(i / count)), false);
        return;
      case OpCode::kReduceScatter:
        for (int64_t i = 0; i < count; ++i) expect(i, rank_ * count + i, all, average);
        return;
      case OpCode::kAllReduce:
      case OpCode::kReduce:
        if (request.op == OpCode::kReduce && rank_ != request.root) {
          for (size_t i = 0; i < request.count; ++i) {  // also where it could serve as the output
            if (at({Buffer::kIn, 0, 0}, i).from != one(rank_)) throw Failure("changes its input");
          }
          return;
        }
        for (int64_t i = 0; i < count; ++i) expect(i, i, all, average);
        return;
      case OpCode::kBroadcast:
        for (int64_t i = 0; i < count; ++i) expect(i, i, one(request.root), false);
        return;
      case OpCode::kScatter:
        for (int64_t i = 0; i < count; ++i) expect(i, rank_ * count + i, one(request.root), false);
        return;
      case OpCode::kAllToAll:
        for (int source = 0; source < p; ++source) {
          for (int64_t i = 0; i < count; ++i)
            expect(offset++, element(source, rank_ * count + i), one(source), false);
        }
        return;
      case OpCode::kPointToPoint:
        return;
    }
  }

 private:
  static size_t index(const Span& span) { return static_cast<size_t>(span.buffer); }
  std::string where(const Span& span) const {
    static constexpr const char* kNames[] = {"in", "out", "temp"};
    return std::string(" at ") + kNames[index(span)] + "[" + std::to_string(span.offset) + ", +" +
           std::to_string(span.bytes) + ")";
  }
  // Of all_to_all: the i-th of rank `source`.
  int64_t element(int source, int64_t i) const {
    return source * static_cast<int64_t>(operation_.ranks.size() * operation_.request.count) + i;
  }

  void layOut(const ScheduleRequest& request) {
    const size_t count = request.count;
    const size_t wide = count * operation_.ranks.size();
    const bool root = rank_ == request.root;
    size_t in = count;
    size_t out = count;
    size_t in_base = 0;  // of `in` inside `out`, or the other way round, when they share memory
    size_t out_base = 0;
    switch (request.op) {
      case OpCode::kBarrier:
        in = out = 0;
        break;
      case OpCode::kAllGather:
        out = wide;
        in_base = static_cast<size_t>(rank_) * count;
        break;
      case OpCode::kGather:
        out = root ? wide : count;
        in_base = root ? static_cast<size_t>(rank_) * count : 0;
        break;
      case OpCode::kReduceScatter:
        in = wide;
        out_base = static_cast<size_t>(rank_) * count;
        break;
      case OpCode::kScatter:
        in = root ? wide : count;
        out_base = root ? static_cast<size_t>(rank_) * count : 0;
        break;
      case OpCode::kAllToAll:
        in = out = wide;
        break;
      default:
        break;
    }
    sizes_[0] = in;
    sizes_[1] = out;
    sizes_[2] = schedule_.temp_bytes;
    storage_[0].resize(in);
    storage_[1].resize(out);
    storage_[2].resize(schedule_.temp_bytes);
    for (int i = 0; i < 3; ++i) memory_[i] = storage_[i].data();
    if (operation_.in_place) {
      storage_[0].clear();
      storage_[1].assign(std::max(in, out), {});
      memory_[0] = memory_[1] = storage_[1].data();
      base_[0] = in_base;
      base_[1] = out_base;
    }
    // Only the root's input counts where there is one; elsewhere it may be anything, so it stays
    // empty.
    if ((request.op == OpCode::kBroadcast || request.op == OpCode::kScatter) && !root) return;
    for (size_t i = 0; i < in; ++i) {
      Value& value = memory_[0][base_[0] + i];
      value.element = static_cast<int64_t>(i);
      if (request.op == OpCode::kAllGather || request.op == OpCode::kGather) {
        value.element += static_cast<int64_t>(rank_ * count);
      } else if (request.op == OpCode::kAllToAll) {
        value.element = element(rank_, static_cast<int64_t>(i));
      }
      value.from.set(static_cast<size_t>(rank_));
    }
  }

  const CheckedOperation& operation_;
  int rank_;
  Schedule schedule_;
  Values storage_[3];
  Value* memory_[3] = {};
  size_t base_[3] = {};
  size_t sizes_[3] = {};
};

struct PostedSend {
  size_t operation;
  Part* part;
  Span span;
  Values snapshot;
  int* pending;
};

struct PostedRecv {
  size_t operation;
  Part* part;
  Recv recv;
  int* pending;
};

struct RunningPart {
  size_t operation = 0;
  Part* part = nullptr;
  size_t next_step = 0;
  int pending = 0;   // of the current step
  int deferred = 0;  // sends that may be in flight until the end
};

class Run {
 public:
  Run(int num_ranks, const std::vector<CheckedOperation>& operations, uint64_t seed, Fault fault)
      : num_ranks_(num_ranks),
        operations_(operations),
        random_(seed),
        queues_(static_cast<size_t>(num_ranks)) {
    for (size_t i = 0; i < operations.size(); ++i) {
      for (size_t j = 0; j < operations[i].ranks.size(); ++j) {
        const bool faulty =
            i == 0 && (j + 1 == operations[i].ranks.size() || fault == Fault::kBlockingSends);
        parts_.emplace_back(operations[i], static_cast<int>(j), faulty ? fault : Fault::kNone);
        queues_[static_cast<size_t>(operations[i].ranks[j])].push_back(
            {i, &parts_.back(), 0, 0, 0});
      }
    }
  }

  void execute() {
    for (int rank = 0; rank < num_ranks_; ++rank) advance(rank);
    while (!ready_.empty()) {
      const size_t pick = std::uniform_int_distribution<size_t>(0, ready_.size() - 1)(random_);
      const auto pair = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      match(pair.first, pair.second);
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (!queues_[static_cast<size_t>(rank)].empty()) throw Failure(stuck());
    }
    for (Part& part : parts_) part.checkResult();
  }

 private:
  using Pair = std::pair<int, int>;

  // Posts what a rank may post; ends its operation when all has ended.
  void advance(int rank) {
    auto& queue = queues_[static_cast<size_t>(rank)];
    while (!queue.empty()) {
      RunningPart& running = queue.front();
      const auto& steps = running.part->schedule().steps;
      if (running.pending > 0) return;
      if (running.next_step < steps.size()) {
        post(rank, running, steps[running.next_step++]);
      } else if (running.deferred > 0) {
        return;
      } else {
        queue.pop_front();
      }
    }
  }

  void post(int rank, RunningPart& running, const Step& step) {
    for (const Move& move : step.moves) running.part->move(move);
    const auto& ranks = operations_[running.operation].ranks;
    for (const Recv& recv : step.recvs) {
      const int peer = ranks.at(static_cast<size_t>(recv.peer));
      ++running.pending;
      recvs_[{peer, rank}].push_back({running.operation, running.part, recv, &running.pending});
      becomeReady({peer, rank}, recvs_[{peer, rank}].size() == 1);
    }
    for (const Send& send : step.sends) {
      const int peer = ranks.at(static_cast<size_t>(send.peer));
      int& pending = send.deferred ? running.deferred : running.pending;
      ++pending;
      sends_[{rank, peer}].push_back(
          {running.operation, running.part, send.from, running.part->read(send.from), &pending});
      becomeReady({rank, peer}, sends_[{rank, peer}].size() == 1);
    }
  }

  void becomeReady(Pair pair, bool first) {
    if (first && !sends_[pair].empty() && !recvs_[pair].empty()) ready_.push_back(pair);
  }

  void match(int source, int target) {
    auto& sends = sends_[{source, target}];
    auto& recvs = recvs_[{source, target}];
    PostedSend send = std::move(sends.front());
    sends.pop_front();
    const PostedRecv recv = recvs.front();
    recvs.pop_front();
    const std::string pair =
        " (rank " + std::to_string(source) + " to " + std::to_string(target) + ")";
    if (send.operation != recv.operation) throw Failure("messages of two operations meet" + pair);
    const Values now = send.part->read(send.span);
    if (now != send.snapshot) throw Failure("a span changes while it is sent" + pair);
    if (now.size() != recv.recv.to.bytes) throw Failure("a message does not fit" + pair);
    if (recv.recv.reduce) {
      recv.part->reduce(recv.recv.to, recv.recv.operand, now);
    } else {
      recv.part->write(recv.recv.to, now);
    }
    --*send.pending;
    --*recv.pending;
    if (!sends.empty() && !recvs.empty()) ready_.push_back({source, target});
    advance(source);
    advance(target);
  }

  std::string stuck() const {
    std::string text = "ranks wait in a circle:";
    for (int rank = 0; rank < num_ranks_; ++rank) {
      const auto& queue = queues_[static_cast<size_t>(rank)];
      if (queue.empty()) continue;
      text += " " + std::to_string(rank) + " in step " + std::to_string(queue.front().next_step) +
              " of operation " + std::to_string(queue.front().operation);
    }
    return text;
  }

  int num_ranks_;
  const std::vector<CheckedOperation>& operations_;
  std::mt19937_64 random_;
  std::deque<Part> parts_;
  std::vector<std::deque<RunningPart>> queues_;
  std::map<Pair, std::deque<PostedSend>> sends_;
  std::map<Pair, std::deque<PostedRecv>> recvs_;
  std::vector<Pair> ready_;
};

}  // namespace

std::string checkOperations(int num_ranks, const std::vector<CheckedOperation>& operations,
                            uint64_t seed, Fault fault) {
  try {
    Run(num_ranks, operations, seed, fault).execute();
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

}  // namespace hdpcomm
