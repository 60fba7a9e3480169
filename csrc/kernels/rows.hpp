// Launchers of segmented row copies: the zigzag gather and scatter, and the packing of messages.
#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/rows_elem.hpp"

namespace hdpcomm::kernels {

// Row i of dst begins at dst + i * dst_stride bytes; the same for src. No destination row may occur
// in two segments, and dst and src do not overlap.
struct RowsArgs {
  void* dst = nullptr;
  const void* src = nullptr;
  int64_t dst_stride = 0;
  int64_t src_stride = 0;
  int64_t row_bytes = 0;                 // 0: nothing is copied, only positions are written
  const RowSegment* segments = nullptr;  // on the device for the CUDA launchers
  int64_t num_segments = 0;
  int64_t total_rows = 0;         // sum of the segments' rows
  int64_t* positions = nullptr;   // copyRows: if not null, gets the position of each dst row
  DType dtype = DType::kFloat32;  // addRows: float32 or float64
};

void copyRowsCpu(const RowsArgs& args);
// Enqueues on `stream` (a cudaStream_t). Throws InvalidUsage or, when the launch fails,
// DeviceError.
void copyRowsCuda(const RowsArgs& args, void* stream);

// dst += src by rows.
void addRowsCpu(const RowsArgs& args);
void addRowsCuda(const RowsArgs& args, void* stream);

void checkRows(const RowsArgs& args);
void checkAddRows(const RowsArgs& args);

}  // namespace hdpcomm::kernels
