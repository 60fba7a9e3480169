// The devices that there are.
#pragma once

#include <memory>
#include <vector>

#include "device/device_api.hpp"

namespace hdpcomm {

// A device on the CPU: streams are threads, device memory is host memory (any host address counts
// as device memory). While a check runs (sim_check.hpp) the new device takes part in it. `ordinal`
// is a free number, usually the rank. `out_of_reach`: devices for which canAccessPeer() is false.
std::shared_ptr<DeviceApi> openSimDevice(int ordinal, std::vector<int> out_of_reach = {});

// CUDA device `ordinal`, by its primary context (the one of torch and of the CUDA runtime). The
// driver is opened here, not before: throws DeviceError where there is none.
std::shared_ptr<DeviceApi> openCudaDevice(int ordinal);

// How many CUDA devices there are; 0 where there is no driver.
int cudaDeviceCount() noexcept;

// The CUDA version that the driver is for, 12040 for 12.4; 0 without a driver.
int cudaDriverVersion() noexcept;

}  // namespace hdpcomm
