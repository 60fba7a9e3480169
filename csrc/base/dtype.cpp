#include "base/dtype.hpp"

namespace hdpcomm {

const char* dtypeName(DType dtype) {
  static constexpr const char* kNames[kNumDTypes] = {
      "uint8",   "int8",    "int16", "int32",  "int64",  "float16", "bfloat16",
      "float32", "float64", "bool",  "uint16", "uint32", "uint64"};
  const auto index = static_cast<size_t>(dtype);
  return index < kNumDTypes ? kNames[index] : "unknown";
}

}  // namespace hdpcomm
