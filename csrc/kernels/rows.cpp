#include "kernels/rows.hpp"

#include <cstring>
#include <numeric>
#include <string>

#include "base/error.hpp"

namespace hdpcomm::kernels {
namespace {

template <typename Value>
void addRowsOf(const RowsArgs& args) {
  const int64_t width = args.row_bytes / static_cast<int64_t>(sizeof(Value));
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const RowSegment& segment = args.segments[s];
    auto* dst = static_cast<char*>(args.dst) + segment.dst * args.dst_stride;
    const auto* src = static_cast<const char*>(args.src) + segment.src * args.src_stride;
    for (int64_t row = 0; row < segment.rows; ++row) {
      auto* __restrict to = reinterpret_cast<Value*>(dst + row * args.dst_stride);
      const auto* __restrict from = reinterpret_cast<const Value*>(src + row * args.src_stride);
      for (int64_t i = 0; i < width; ++i) to[i] += from[i];
    }
  }
}

}  // namespace

void checkRows(const RowsArgs& args) {
  if (args.row_bytes < 0 || args.num_segments < 0 || args.total_rows < 0) {
    throwInvalidUsage("sizes of a row copy must not be negative; got row_bytes=" +
                      std::to_string(args.row_bytes) +
                      ", segments=" + std::to_string(args.num_segments) +
                      ", rows=" + std::to_string(args.total_rows));
  }
}

void checkAddRows(const RowsArgs& args) {
  checkRows(args);
  if (args.dtype != DType::kFloat32 && args.dtype != DType::kFloat64) {
    throwInvalidUsage(std::string("cannot add rows of ") + dtypeName(args.dtype) +
                      "; expected float32 or float64");
  }
  const auto element = static_cast<int64_t>(dtypeBytes(args.dtype));
  if (args.row_bytes % element != 0 || args.dst_stride % element != 0 ||
      args.src_stride % element != 0) {
    throwInvalidUsage("rows of " + std::to_string(args.row_bytes) + " bytes with strides " +
                      std::to_string(args.dst_stride) + " and " + std::to_string(args.src_stride) +
                      " do not hold whole elements of " + dtypeName(args.dtype));
  }
}

void copyRowsCpu(const RowsArgs& args) {
  checkRows(args);
  const bool whole = args.dst_stride == args.row_bytes && args.src_stride == args.row_bytes;
  const auto row_bytes = static_cast<size_t>(args.row_bytes);
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const RowSegment& segment = args.segments[s];
    if (args.positions != nullptr) {
      std::iota(args.positions + segment.dst, args.positions + segment.dst + segment.rows,
                segment.position);
    }
    if (row_bytes == 0) continue;
    auto* dst = static_cast<char*>(args.dst) + segment.dst * args.dst_stride;
    const auto* src = static_cast<const char*>(args.src) + segment.src * args.src_stride;
    if (whole) {
      std::memcpy(dst, src, static_cast<size_t>(segment.rows) * row_bytes);
      continue;
    }
    for (int64_t row = 0; row < segment.rows; ++row) {
      std::memcpy(dst + row * args.dst_stride, src + row * args.src_stride, row_bytes);
    }
  }
}

void addRowsCpu(const RowsArgs& args) {
  checkAddRows(args);
  if (args.dtype == DType::kFloat32) return addRowsOf<float>(args);
  addRowsOf<double>(args);
}

}  // namespace hdpcomm::kernels
