// Reduction of two elements, division and conversion, shared by the CPU loops and the CUDA kernels.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/call.hpp"
#include "kernels/host_device.hpp"
#include "kernels/numeric_elem.hpp"

namespace hdpcomm::kernels {

// a op b in the type of computation (Wide<T>). Integers wrap; NaN on either side gives NaN. kAvg
// sums.
template <RedOp op, typename T>
HDP_HOST_DEVICE T combine(T a, T b) {
  if constexpr (op == RedOp::kMin) {
    return b < a || b != b ? b : a;
  } else if constexpr (op == RedOp::kMax) {
    return a < b || b != b ? b : a;
  } else if constexpr (std::is_integral_v<T>) {
    // Unsigned, since signed overflow would be undefined.
    using U = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
    const U x = static_cast<U>(a);
    const U y = static_cast<U>(b);
    return static_cast<T>(op == RedOp::kProd ? x * y : x + y);
  } else {
    return op == RedOp::kProd ? a * b : a + b;
  }
}

// out = a op b, rounded once.
template <RedOp op, typename T>
HDP_HOST_DEVICE void reduceElement(T a, T b, T& out) {
  narrow(combine<op, Wide<T>>(widen(a), widen(b)), out);
}

// out = a / divisor.
template <typename T>
HDP_HOST_DEVICE void divideElement(T a, Wide<T> divisor, T& out) {
  narrow(widen(a) / divisor, out);
}

namespace detail {

// Constants for device code, which cannot call numeric_limits.
template <typename T>
inline constexpr T kLowest = std::numeric_limits<T>::min();
template <typename T>
inline constexpr T kHighest = std::numeric_limits<T>::max();

}  // namespace detail

// Converts as torch does: to nearest, ties to even, towards zero for integers; fp64 and integers go
// to 16 bits through fp32. Unlike C++, defined for every input: what an integer type cannot hold
// becomes its nearest value, and NaN becomes 0.
template <typename To, typename From>
HDP_HOST_DEVICE void convertElement(From from, To& out) {
  const auto value = widen(from);
  using Value = std::remove_const_t<decltype(value)>;
  if constexpr (std::is_integral_v<To> && std::is_floating_point_v<Value>) {
    constexpr To kLow = detail::kLowest<To>;
    constexpr To kHigh = detail::kHighest<To>;
    // -2^n is exact in every floating type here; 2^n - 1 is not, so the comparison is with 2^n.
    if (value != value) {
      out = 0;
    } else if (value < static_cast<Value>(kLow)) {
      out = kLow;
    } else if (value >= -static_cast<Value>(kLow)) {
      out = kHigh;
    } else {
      out = static_cast<To>(value);
    }
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<Value> &&
                       sizeof(To) < sizeof(Value)) {
    constexpr auto kLow = static_cast<Value>(detail::kLowest<To>);
    constexpr auto kHigh = static_cast<Value>(detail::kHighest<To>);
    out = static_cast<To>(value < kLow ? kLow : (value > kHigh ? kHigh : value));
  } else {
    narrow(static_cast<Wide<To>>(value), out);
  }
}

}  // namespace hdpcomm::kernels
