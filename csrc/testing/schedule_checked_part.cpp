#include "testing/schedule_checked_part.hpp"

#include <algorithm>
#include <utility>

namespace hdpcomm::testing {
namespace {

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

}  // namespace

CheckedPart::CheckedPart(const CheckedOperation& operation, int group_rank, Fault fault)
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

Value& CheckedPart::at(const Span& span, size_t i) {
  const size_t offset = span.offset + i;
  if (offset >= sizes_[index(span)]) throw Failure("a span ends outside its buffer" + where(span));
  return memory_[index(span)][base_[index(span)] + offset];
}

Values CheckedPart::read(const Span& span) {
  Values values(span.bytes);
  for (size_t i = 0; i < span.bytes; ++i) {
    values[i] = at(span, i);
    if (values[i].element < 0) throw Failure("reads what has not arrived" + where(span));
  }
  return values;
}

void CheckedPart::write(const Span& to, const Values& values) {
  if (to.buffer == Buffer::kIn) throw Failure("writes to its input" + where(to));
  if (to.bytes != values.size()) throw Failure("sizes differ" + where(to));
  for (size_t i = 0; i < values.size(); ++i) at(to, i) = values[i];
}

void CheckedPart::reduce(const Span& to, const Span& operand, const Values& message) {
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

void CheckedPart::move(const Move& move) {
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

void CheckedPart::checkResult() {
  const ScheduleRequest& request = operation_.request;
  const int p = static_cast<int>(operation_.ranks.size());
  const auto count = static_cast<int64_t>(request.count);
  std::bitset<kMaxCheckedGroup> all;
  for (int i = 0; i < p; ++i) all.set(i);
  const auto one = [](int rank) { return std::bitset<kMaxCheckedGroup>().set(rank); };
  const auto expect = [&](int64_t i, int64_t element, const std::bitset<kMaxCheckedGroup>& from,
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
      for (int64_t i = 0; i < p * count; ++i) expect(i, i, one(static_cast<int>(i / count)), false);
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
    case OpCode::kResync:
      return;
  }
}

std::string CheckedPart::where(const Span& span) const {
  static constexpr const char* kNames[] = {"in", "out", "temp"};
  return std::string(" at ") + kNames[index(span)] + "[" + std::to_string(span.offset) + ", +" +
         std::to_string(span.bytes) + ")";
}

int64_t CheckedPart::element(int source, int64_t i) const {
  return source * static_cast<int64_t>(operation_.ranks.size() * operation_.request.count) + i;
}

void CheckedPart::layOut(const ScheduleRequest& request) {
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

}  // namespace hdpcomm::testing
