// Opens CUDA devices and simulated ones, and counts what CUDA has.
#pragma once

#include <memory>
#include <vector>

#include "device/device_api.hpp"

namespace hdpcomm {

// A device on the CPU: streams are threads, device memory is host memory (any host address counts
// as device memory). `ordinal` may be any number, usually the rank. `out_of_reach`: devices for
// which canAccessPeer() is false.
std::shared_ptr<DeviceApi> openSimDevice(int ordinal, std::vector<int> out_of_reach = {});

// CUDA device `ordinal` in its primary context (which torch and the CUDA runtime use, too). The
// driver is opened by the first call; throws DeviceError where there is none.
std::shared_ptr<DeviceApi> openCudaDevice(int ordinal);

// The number of CUDA devices; 0 without a driver.
int cudaDeviceCount() noexcept;

}  // namespace hdpcomm
