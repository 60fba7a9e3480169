// Turns an element type and an operation known at run time into types at compile time.
#pragma once

#include "base/dtype.hpp"
#include "kernels/reduce_elem.hpp"

namespace hdpcomm::kernels {

// Calls `function(T{})` for bfloat16, float16 or, by default, float32.
template <typename Function>
void withFloat(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
    default:
      return function(float{});
  }
}

template <RedOp op>
struct OpTag {
  static constexpr RedOp kOp = op;
};

// Calls `function(OpTag<op>{})`; avg sums.
template <typename Function>
void withOp(RedOp op, Function&& function) {
  switch (op) {
    case RedOp::kProd:
      return function(OpTag<RedOp::kProd>{});
    case RedOp::kMin:
      return function(OpTag<RedOp::kMin>{});
    case RedOp::kMax:
      return function(OpTag<RedOp::kMax>{});
    default:
      return function(OpTag<RedOp::kSum>{});
  }
}

// Calls `function(T{}, OpTag<op>{})` for a combination that reduceFunction() has. Sums and products
// of signed integers have the bits of unsigned ones, so they share code.
template <typename Function>
void withReduction(DType dtype, RedOp op, Function&& function) {
  const bool ordered = op == RedOp::kMin || op == RedOp::kMax;
  const auto ints = [&](auto signed_value, auto unsigned_value, bool is_signed) {
    if (ordered && is_signed) {
      if (op == RedOp::kMin) return function(signed_value, OpTag<RedOp::kMin>{});
      return function(signed_value, OpTag<RedOp::kMax>{});
    }
    withOp(op, [&](auto tag) { function(unsigned_value, tag); });
  };
  switch (dtype) {
    case DType::kBool:  // on 0/1 bytes: sum and max are "or", prod and min are "and"
      if (op == RedOp::kSum || op == RedOp::kMax) return function(uint8_t{}, OpTag<RedOp::kMax>{});
      return function(uint8_t{}, OpTag<RedOp::kMin>{});
    case DType::kUint8:
    case DType::kInt8:
      return ints(int8_t{}, uint8_t{}, dtype == DType::kInt8);
    case DType::kUint16:
    case DType::kInt16:
      return ints(int16_t{}, uint16_t{}, dtype == DType::kInt16);
    case DType::kUint32:
    case DType::kInt32:
      return ints(int32_t{}, uint32_t{}, dtype == DType::kInt32);
    case DType::kUint64:
    case DType::kInt64:
      return ints(int64_t{}, uint64_t{}, dtype == DType::kInt64);
    case DType::kFloat16:
      return withOp(op, [&](auto tag) { function(Float16{}, tag); });
    case DType::kBFloat16:
      return withOp(op, [&](auto tag) { function(BFloat16{}, tag); });
    case DType::kFloat32:
      return withOp(op, [&](auto tag) { function(float{}, tag); });
    case DType::kFloat64:
      return withOp(op, [&](auto tag) { function(double{}, tag); });
  }
}

}  // namespace hdpcomm::kernels
