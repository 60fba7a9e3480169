// The element types of conversions.
#pragma once

#include "base/dtype.hpp"
#include "kernels/reduce_elem.hpp"

namespace hdpcomm::kernels {

// Calls `function` with a value of the type; false if there are no conversions of it.
template <typename Function>
bool withCastType(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      function(Float16{});
      return true;
    case DType::kBFloat16:
      function(BFloat16{});
      return true;
    case DType::kFloat32:
      function(float{});
      return true;
    case DType::kFloat64:
      function(double{});
      return true;
    case DType::kInt32:
      function(int32_t{});
      return true;
    case DType::kInt64:
      function(int64_t{});
      return true;
    default:
      return false;
  }
}

}  // namespace hdpcomm::kernels
