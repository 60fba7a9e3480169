// Reduction of two elements, and division, shared by the CPU loops and the CUDA kernels.
#pragma once

#include <cstdint>
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

}  // namespace hdpcomm::kernels
