#include "hdpcomm/collective/reduce.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

#include "hdpcomm/base/error.hpp"

// Compiled for several instruction sets; the loader picks one. GCC vectorises the loops below at
// -O3.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define HDP_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HDP_MULTIVERSION
#endif

namespace hdpcomm {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline float toFloat(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

inline void fromFloat(float value, BFloat16& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded =
      (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;  // to nearest, ties to even
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40U : rounded);
}

// Branch-free conversions (after the well-known exponent-shift construction), so that the loops
// vectorise without F16C.
inline float toFloat(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000U) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffU);
  const float normal = std::bit_cast<float>((magnitude << 13) + (112U << 23));
  const float subnormal =
      std::bit_cast<float>((magnitude << 13) + (113U << 23)) - std::bit_cast<float>(113U << 23);
  const uint32_t infinite = (magnitude << 13) | 0x7f800000U;
  const uint32_t finite = std::bit_cast<uint32_t>(magnitude < 0x400U ? subnormal : normal);
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00U ? infinite : finite));
}

inline void fromFloat(float value, Half& out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  const uint32_t normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  // Adding 0.5 lines the mantissa of a subnormal result up with its last bit, rounded by the FPU.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  uint32_t result = magnitude < (113U << 23) ? subnormal : normal;
  result = magnitude >= 0x477ff000U ? 0x7c00U : result;
  result = magnitude > 0x7f800000U ? 0x7e00U : result;
  out.bits = static_cast<uint16_t>(sign | result);
}

template <RedOp op, typename T>
inline T combine(T a, T b) {
  // Unsigned arithmetic where signed overflow would be undefined; it wraps, as everywhere else.
  if constexpr (op == RedOp::kSum || op == RedOp::kProd) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;
      const U x = static_cast<U>(a);
      const U y = static_cast<U>(b);
      return static_cast<T>(op == RedOp::kSum ? x + y : x * y);
    } else {
      return op == RedOp::kSum ? a + b : a * b;
    }
  } else if constexpr (op == RedOp::kMin) {
    return b < a || b != b ? b : a;  // a NaN on either side stays
  } else {
    return a < b || b != b ? b : a;
  }
}

template <typename T>
constexpr bool kIs16BitFloat = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

template <RedOp op, typename T>
struct Reducer {
  HDP_MULTIVERSION static void run(void* out_, const void* a_, const void* b_, size_t count) {
    auto* out = static_cast<T*>(out_);
    const auto* a = static_cast<const T*>(a_);
    const auto* b = static_cast<const T*>(b_);
    for (size_t i = 0; i < count; ++i) {
      if constexpr (kIs16BitFloat<T>) {
        fromFloat(combine<op, float>(toFloat(a[i]), toFloat(b[i])), out[i]);
      } else {
        out[i] = combine<op, T>(a[i], b[i]);
      }
    }
  }
};

template <typename T>
ReduceFn reducerOf(RedOp op) {
  switch (op) {
    case RedOp::kSum:
    case RedOp::kAvg:
      return Reducer<RedOp::kSum, T>::run;
    case RedOp::kProd:
      return Reducer<RedOp::kProd, T>::run;
    case RedOp::kMin:
      return Reducer<RedOp::kMin, T>::run;
    case RedOp::kMax:
      return Reducer<RedOp::kMax, T>::run;
    case RedOp::kNone:
      break;
  }
  return nullptr;
}

template <typename T>
void scale(void* data_, size_t count, double divisor) {
  auto* data = static_cast<T*>(data_);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kIs16BitFloat<T>) {
      fromFloat(toFloat(data[i]) / static_cast<float>(divisor), data[i]);
    } else {
      data[i] = data[i] / static_cast<T>(divisor);
    }
  }
}

ReduceFn lookUp(DType dtype, RedOp op) {
  switch (dtype) {
    case DType::kUint8:
      return reducerOf<uint8_t>(op);
    case DType::kInt8:
      return reducerOf<int8_t>(op);
    case DType::kInt16:
      return reducerOf<int16_t>(op);
    case DType::kUint16:
      return reducerOf<uint16_t>(op);
    case DType::kInt32:
      return reducerOf<int32_t>(op);
    case DType::kUint32:
      return reducerOf<uint32_t>(op);
    case DType::kInt64:
      return reducerOf<int64_t>(op);
    case DType::kUint64:
      return reducerOf<uint64_t>(op);
    case DType::kFloat16:
      return reducerOf<Half>(op);
    case DType::kBFloat16:
      return reducerOf<BFloat16>(op);
    case DType::kFloat32:
      return reducerOf<float>(op);
    case DType::kFloat64:
      return reducerOf<double>(op);
    case DType::kBool:
      // On 0/1 bytes: sum and max are "or", prod and min are "and".
      return reducerOf<uint8_t>(op == RedOp::kSum    ? RedOp::kMax
                                : op == RedOp::kProd ? RedOp::kMin
                                                     : op);
  }
  return nullptr;
}

}  // namespace

ReduceFn reduceFunction(DType dtype, RedOp op) {
  if (op == RedOp::kAvg) scaleFunction(dtype);  // throws for types without division
  const ReduceFn function = lookUp(dtype, op);
  if (function == nullptr) {
    throwInvalidUsage(std::string("no reduction '") + redOpName(op) + "' for " + dtypeName(dtype));
  }
  return function;
}

ScaleFn scaleFunction(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return scale<Half>;
    case DType::kBFloat16:
      return scale<BFloat16>;
    case DType::kFloat32:
      return scale<float>;
    case DType::kFloat64:
      return scale<double>;
    default:
      throwInvalidUsage(std::string("op 'avg' needs a floating type, not ") + dtypeName(dtype) +
                        "; use 'sum' and divide");
  }
}

}  // namespace hdpcomm
