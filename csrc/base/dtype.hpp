// Element types that cross the boundary to Python.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hdpcomm {

enum class DType : uint8_t {
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kUint16,
  kUint32,
  kUint64,
};
inline constexpr int kNumDTypes = 13;

constexpr size_t dtypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

const char* dtypeName(DType dtype);

}  // namespace hdpcomm
