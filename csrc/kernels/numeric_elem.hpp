// 16-bit floating-point values as bits, and their conversion to float and back on the CPU and CUDA.
//
// Conversions round to nearest, ties to even, and give the same bits on both except for NaN
// payloads: the CPU keeps what fits, a GPU has one NaN. The CPU's code is branch-free, so that
// compilers vectorise it without F16C; a GPU converts in one instruction.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/host_device.hpp"

namespace hdpcomm::kernels {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

template <typename T>
inline constexpr bool kIs16BitFloat = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

// The type in which a T is computed.
template <typename T>
using Wide = std::conditional_t<kIs16BitFloat<T>, float, T>;

namespace detail {

HDP_HOST_DEVICE float floatFromBits(uint32_t bits) {
  union {
    uint32_t integer;
    float real;
  } both{bits};
  return both.real;
}

HDP_HOST_DEVICE uint32_t bitsOf(float value) {
  union {
    float real;
    uint32_t integer;
  } both{value};
  return both.integer;
}

}  // namespace detail

template <typename T>
  requires(!kIs16BitFloat<T>)
HDP_HOST_DEVICE T widen(T value) {
  return value;
}

HDP_HOST_DEVICE float widen(BFloat16 value) {
  return detail::floatFromBits(static_cast<uint32_t>(value.bits) << 16);
}

// Normal values by shifting the exponent, subnormal ones by an exact subtraction.
HDP_HOST_DEVICE float widen(Float16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t exponent = rest & 0x0f800000u;
  const uint32_t normal = rest + 0x38000000u;   // exponent bias 15 -> 127
  const uint32_t special = rest + 0x70000000u;  // inf and NaN keep their payload
  const float subnormal =
      detail::floatFromBits(rest + 0x38800000u) - detail::floatFromBits(0x38800000u);  // 2^-14
  const uint32_t magnitude =
      exponent == 0 ? detail::bitsOf(subnormal) : (exponent == 0x0f800000u ? special : normal);
  return detail::floatFromBits(sign | magnitude);
#endif
}

template <typename T>
  requires(!kIs16BitFloat<T>)
HDP_HOST_DEVICE void narrow(T value, T& out) {
  out = value;
}

HDP_HOST_DEVICE void narrow(float value, BFloat16& out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  const uint32_t bits = detail::bitsOf(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
#endif
}

HDP_HOST_DEVICE void narrow(float value, Float16& out) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(value));
#else
  const uint32_t bits = detail::bitsOf(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Adding 0.5 lines the mantissa of a subnormal result up with its last bit, rounded by the FPU.
  const uint32_t subnormal = detail::bitsOf(detail::floatFromBits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  out.bits = static_cast<uint16_t>(sign | result);
#endif
}

}  // namespace hdpcomm::kernels
