// One rank's part of one operation, executed symbolically (schedule_checker.cpp).
#pragma once

#include <bitset>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "testing/schedule_checker.hpp"

namespace hdpcomm::testing {

inline constexpr int kMaxCheckedGroup = 128;

struct Value {
  int64_t element = -1;  // -1: nothing there
  std::bitset<kMaxCheckedGroup> from;
  int scaled = 0;
  bool operator==(const Value&) const = default;
};

using Values = std::vector<Value>;

// A mistake in a schedule.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One rank's part of one operation. All offsets are elements of one byte: the request's
// element_bytes is 1.
class CheckedPart {
 public:
  // Throws std::invalid_argument when its schedule has no place for the fault.
  CheckedPart(const CheckedOperation& operation, int group_rank, Fault fault);

  const Schedule& schedule() const { return schedule_; }
  // These throw Failure where the schedule breaks a rule.
  Value& at(const Span& span, size_t i);
  Values read(const Span& span);
  void write(const Span& to, const Values& values);
  void reduce(const Span& to, const Span& operand, const Values& message);
  void move(const Move& move);
  // Throws Failure unless every element that the operation promises is there.
  void checkResult();

 private:
  static size_t index(const Span& span) { return static_cast<size_t>(span.buffer); }
  std::string where(const Span& span) const;
  // The i-th element of rank `source` in an all_to_all.
  int64_t element(int source, int64_t i) const;
  void layOut(const ScheduleRequest& request);

  const CheckedOperation& operation_;
  int rank_;
  Schedule schedule_;
  Values storage_[3];
  Value* memory_[3] = {};
  size_t base_[3] = {};
  size_t sizes_[3] = {};
};

}  // namespace hdpcomm::testing
