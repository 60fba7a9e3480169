// A small kernel for tests of ordering: whether it ran before or after something shows in its sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device_api.hpp"

namespace hdpcomm {

// dst[i] += src[i], modulo 2^32.
KernelLaunch accumulateKernel(uint32_t* dst, const uint32_t* src, size_t count);

namespace detail {
void accumulateCuda(uint32_t* dst, const uint32_t* src, size_t count, void* stream);
}

}  // namespace hdpcomm
