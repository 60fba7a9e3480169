// Element-wise reductions on host memory.
#pragma once

#include "hdpcomm/transport/call.hpp"
#include "hdpcomm/transport/transport.hpp"

namespace hdpcomm {

// out[i] = a[i] op b[i]. 16-bit floats are computed in fp32 and rounded once. avg sums;
// scaleFunction() divides at the end. Throws InvalidUsage for a combination that does not exist
// (bool, avg of integers).
ReduceFn reduceFunction(DType dtype, RedOp op);

// data[i] = data[i] / divisor; floating types only.
using ScaleFn = void (*)(void* data, size_t count, double divisor);
ScaleFn scaleFunction(DType dtype);

}  // namespace hdpcomm
