// 16-bit floating-point values as bits, and their way to float: one for the CPU and for CUDA.
#pragma once

#include <cstdint>

#include "hdpcomm/kernels/host_device.hpp"

namespace hdpcomm::kernels {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

namespace detail {

HDP_HOST_DEVICE float floatFromBits(uint32_t bits) {
  union {
    uint32_t integer;
    float real;
  } both{bits};
  return both.real;
}

}  // namespace detail

HDP_HOST_DEVICE float widen(float value) { return value; }
HDP_HOST_DEVICE double widen(double value) { return value; }
HDP_HOST_DEVICE float widen(BFloat16 value) {
  return detail::floatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Branch-free, so that compilers can vectorise it: normal values by moving the exponent, subnormal
// ones by an exact subtraction.
HDP_HOST_DEVICE float widen(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t exponent = rest & 0x0f800000u;
  const uint32_t normal = rest + 0x38000000u;   // exponent bias 15 -> 127
  const uint32_t special = rest + 0x70000000u;  // inf and NaN keep their payload
  const float subnormal =
      detail::floatFromBits(rest + 0x38800000u) - detail::floatFromBits(0x38800000u);  // 2^-14
  union {
    float real;
    uint32_t integer;
  } small{subnormal};
  const uint32_t magnitude =
      exponent == 0 ? small.integer : (exponent == 0x0f800000u ? special : normal);
  return detail::floatFromBits(sign | magnitude);
}

}  // namespace hdpcomm::kernels
