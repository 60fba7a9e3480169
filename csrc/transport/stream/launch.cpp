#include "transport/stream/launch.hpp"

#include <cstring>

// What a CUDA device runs; a build without CUDA has none.
#ifdef HDPCOMM_WITH_CUDA
#define HDP_LAUNCHER(launch) [args](void* stream_handle) { launch(args, stream_handle); }
#else
#define HDP_LAUNCHER(launch) nullptr
#endif

namespace hdpcomm::device {
namespace {

// What a simulated device runs for an item of a kernel that waits: its flags are the device's.
KernelLaunch partOf(const kernels::RelayItem& item, DType dtype, RedOp op) {
  const auto bytes = static_cast<size_t>(item.bytes);
  KernelLaunch part{.name = "relay",
                    .reads = {{item.src, bytes}},
                    .writes = {{item.dst, bytes}},
                    .cpu = [item, dtype, op] { kernels::relayItemCpu(item, dtype, op); },
                    .cuda = nullptr};
  if (item.operand != nullptr) part.reads.push_back({item.operand, bytes});
  if (item.wait != nullptr) {
    part.waits.push_back({item.wait, 1});
    part.signals.push_back({item.wait, 0});
  }
  if (item.set != nullptr) part.signals.push_back({item.set, 1});
  return part;
}

}  // namespace

void launchReduce(DeviceApi& device, const kernels::ReduceArgs& args, Stream stream) {
  const size_t bytes = static_cast<size_t>(args.count) * dtypeBytes(args.dtype);
  device.launch({.name = "reduce",
                 .reads = {{args.a, bytes}, {args.b, bytes}},
                 .writes = {{args.out, bytes}},
                 .cpu = [args] { kernels::reduceCpu(args); },
                 .cuda = HDP_LAUNCHER(kernels::reduceCuda)},
                stream);
}

void launchDivide(DeviceApi& device, const kernels::DivideArgs& args, Stream stream) {
  const size_t bytes = static_cast<size_t>(args.count) * dtypeBytes(args.dtype);
  device.launch({.name = "divide",
                 .reads = {{args.data, bytes}},
                 .writes = {{args.data, bytes}},
                 .cpu = [args] { kernels::divideCpu(args); },
                 .cuda = HDP_LAUNCHER(kernels::divideCuda)},
                stream);
}

void launchPut(DeviceApi& device, const kernels::PutArgs& args, Stream stream) {
  const auto bytes = static_cast<size_t>(args.bytes);
  device.launch({.name = "put",
                 .reads = {{args.src, bytes}},
                 .writes = {{args.dst, bytes}},
                 .cpu = [args, bytes] { std::memcpy(args.dst, args.src, bytes); },
                 .cuda = HDP_LAUNCHER(kernels::putCuda),
                 .signals = {{args.flag, args.value}}},
                stream);
}

void launchFold(DeviceApi& device, const kernels::FoldArgs& args, Stream stream) {
  const size_t bytes = static_cast<size_t>(args.count) * dtypeBytes(args.dtype);
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  for (int i = 0; i < args.num_inputs; ++i) reads.push_back({args.inputs[i], bytes});
  for (int i = 0; i < args.num_outputs; ++i) writes.push_back({args.outputs[i], bytes});
  device.launch({.name = "fold",
                 .reads = std::move(reads),
                 .writes = std::move(writes),
                 .cpu = [args] { kernels::foldCpu(args); },
                 .cuda = HDP_LAUNCHER(kernels::foldCuda)},
                stream);
}

void launchCollect(DeviceApi& device, const kernels::CollectArgs& args, Stream stream) {
  const auto bytes = static_cast<size_t>(args.bytes);
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  for (int i = 0; i < args.num_inputs; ++i) {
    std::byte* place = static_cast<std::byte*>(args.out) + i * args.stride;
    if (place == args.inputs[i]) continue;
    reads.push_back({args.inputs[i], bytes});
    writes.push_back({place, bytes});
  }
  device.launch({.name = "collect",
                 .reads = std::move(reads),
                 .writes = std::move(writes),
                 .cpu = [args] { kernels::collectCpu(args); },
                 .cuda = HDP_LAUNCHER(kernels::collectCuda)},
                stream);
}

void launchRelay(DeviceApi& device, const kernels::RelayArgs& args, Stream stream) {
  if (!device.isSim()) {
    device.launch({.name = "relay", .cuda = HDP_LAUNCHER(kernels::relayCuda)}, stream);
    return;
  }
  std::vector<KernelLaunch> parts;
  for (int i = 0; i < args.num_items; ++i) {
    parts.push_back(partOf(args.items[i], args.dtype, args.op));
  }
  device.launchParts(std::move(parts), stream);
}

void launchPushFold(DeviceApi& device, const kernels::PushFoldArgs& args, Stream stream) {
  if (!device.isSim()) {
    device.launch({.name = "push_fold", .cuda = HDP_LAUNCHER(kernels::pushFoldCuda)}, stream);
    return;
  }
  std::vector<KernelLaunch> parts;
  for (int i = 0; i < args.num_pushes; ++i) {
    parts.push_back(partOf(args.pushes[i], args.dtype, RedOp::kNone));
  }
  const size_t bytes = static_cast<size_t>(args.count) * dtypeBytes(args.dtype);
  KernelLaunch fold{.name = "push_fold",
                    .writes = {{args.out, bytes}},
                    .cpu = [args] { kernels::foldCpu(kernels::foldOf(args)); },
                    .cuda = nullptr};
  for (int i = 0; i < args.num_inputs; ++i) {
    fold.reads.push_back({args.inputs[i], bytes});
    if (args.waits[i] != nullptr) {
      fold.waits.push_back({args.waits[i], 1});
      fold.signals.push_back({args.waits[i], 0});
    }
  }
  for (int i = 0; i < args.num_inputs; ++i) {
    if (args.sets[i] != nullptr) fold.signals.push_back({args.sets[i], 1});
  }
  parts.push_back(std::move(fold));
  device.launchParts(std::move(parts), stream);
}

}  // namespace hdpcomm::device
