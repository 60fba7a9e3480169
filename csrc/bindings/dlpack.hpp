// DLPack's ABI (https://dmlc.github.io/dlpack), as much of it as crosses here.
#pragma once

#include <cstdint>

namespace hdpcomm {

struct DLTensorAbi {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// What a capsule named "dltensor" holds.
struct DLManagedTensorAbi {
  DLTensorAbi tensor;
  void* context;
  void (*deleter)(DLManagedTensorAbi*);
};

namespace dlpack {
constexpr int32_t kCpu = 1, kCuda = 2;
constexpr uint8_t kInt = 0, kUnsigned = 1, kFloat = 2, kBrain = 4, kBoolean = 6;
}  // namespace dlpack

}  // namespace hdpcomm
