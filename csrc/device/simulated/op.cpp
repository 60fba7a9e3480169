#include "device/simulated/op.hpp"

namespace hdpcomm::simulated {

std::string placeOf(const Site& site) {
  const std::string file = site.file;
  const size_t slash = file.rfind('/');
  return (slash == std::string::npos ? file : file.substr(slash + 1)) + ":" +
         std::to_string(site.line);
}

Op Op::copy(void* dst, const void* src, size_t bytes, Site site) {
  device::checkCopy(dst, src, bytes);
  Op op;
  op.kind = OpKind::kCopy;
  op.site = site;
  op.dst = dst;
  op.src = src;
  op.bytes = bytes;
  return op;
}

Op Op::fill(void* dst, unsigned char value, size_t bytes, Site site) {
  device::checkFill(dst, bytes);
  Op op;
  op.kind = OpKind::kFill;
  op.site = site;
  op.dst = dst;
  op.bytes = bytes;
  op.byte = value;
  return op;
}

Op Op::write(uint32_t* flag, uint32_t value, Site site) {
  checkFlag("writeValue", flag);
  Op op;
  op.kind = OpKind::kWriteValue;
  op.site = site;
  op.flag = {flag, value};
  return op;
}

Op Op::wait(uint32_t* flag, uint32_t value, Site site) {
  checkFlag("waitValue", flag);
  Op op;
  op.kind = OpKind::kWaitValue;
  op.site = site;
  op.flag = {flag, value};
  return op;
}

Op Op::launch(KernelLaunch kernel, Site site) {
  if (!kernel.cpu) {
    throwInvalidUsage(std::string("launch of ") + kernel.name +
                      ": it has no CPU twin, which a simulated device runs");
  }
  for (const FlagValue& flag : kernel.waits) checkFlag(kernel.name, flag.flag);
  for (const FlagValue& flag : kernel.signals) checkFlag(kernel.name, flag.flag);
  Op op;
  op.kind = OpKind::kKernel;
  op.site = site;
  op.kernel = std::move(kernel);
  return op;
}

size_t Op::cost() const {
  size_t total = bytes;
  for (const MemoryRange& range : kernel.reads) total += range.bytes;
  for (const MemoryRange& range : kernel.writes) total += range.bytes;
  return total;
}

}  // namespace hdpcomm::simulated
