// The kernels that operations on streams need, as work of a stream: each with its twin on the CPU
// and the memory that it touches.
#pragma once

#include "device/device_api.hpp"
#include "kernels/peers.hpp"
#include "kernels/reduce.hpp"
#include "kernels/relay.hpp"

namespace hdpcomm::device {

void launchReduce(DeviceApi& device, const kernels::ReduceArgs& args, Stream stream);
void launchDivide(DeviceApi& device, const kernels::DivideArgs& args, Stream stream);
void launchPut(DeviceApi& device, const kernels::PutArgs& args, Stream stream);
void launchFold(DeviceApi& device, const kernels::FoldArgs& args, Stream stream);
void launchCollect(DeviceApi& device, const kernels::CollectArgs& args, Stream stream);
void launchRelay(DeviceApi& device, const kernels::RelayArgs& args, Stream stream);
void launchPushFold(DeviceApi& device, const kernels::PushFoldArgs& args, Stream stream);

}  // namespace hdpcomm::device
