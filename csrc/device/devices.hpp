// Opens CUDA devices and simulated ones.
#pragma once

#include <memory>

#include "device/device_api.hpp"

namespace hdpcomm {

// A device on the CPU: streams are threads, device memory is host memory (any host address counts
// as device memory). `ordinal` may be any number, usually the rank.
std::shared_ptr<DeviceApi> openSimDevice(int ordinal);

// CUDA device `ordinal` in its primary context (which torch and the CUDA runtime use, too). The
// driver is opened by the first call; throws DeviceError where there is none.
std::shared_ptr<DeviceApi> openCudaDevice(int ordinal);

}  // namespace hdpcomm
